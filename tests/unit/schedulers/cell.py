"""Real prefill and decode schedulers of a tiny model in one process, taking turns by hand.

Control messages go over ZMQ, pages through the fake backend; the test plays the router and both frontends."""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import zmq
from prometheus_client import CollectorRegistry

from diptych.decode.scheduler import DecodeScheduler
from diptych.engine.background import BackgroundPool
from diptych.engine.frontend_link import FrontendLink
from diptych.engine.grammar import Grammars
from diptych.engine.kv_layout import Fingerprint, KVLayout
from diptych.engine.kv_pool import KVPool
from diptych.engine.models.decoder import DecoderLM
from diptych.engine.prompt_queue import PromptQueue
from diptych.engine.runner import ModelRunner, RunnerFacts
from diptych.engine.running_batch import RunningBatch
from diptych.engine.scheduler import Scheduler, SchedulerParts
from diptych.engine.weight_update import NewWeights, WeightsRefused
from diptych.engine.wire import (
    ActionReply,
    Finish,
    FrontendMessage,
    Generate,
    Grammar,
    OutputBatch,
    SamplingParams,
    encode,
)
from diptych.engine.wire import decode_from_scheduler as decode_reply
from diptych.kernels.registry import make_attention_backend
from diptych.kvtransfer.backends.fake import FakeBackend, FakeFabric
from diptych.kvtransfer.bootstrap.client import LookupFailed, RouteLookup
from diptych.kvtransfer.bootstrap.route import RankAddress, RankRoute, Route
from diptych.kvtransfer.checksum import PageChecksums
from diptych.kvtransfer.control import ControlEndpoint
from diptych.kvtransfer.faults.injector import Injector
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.parts import TransferParts
from diptych.kvtransfer.probe import DeathProbe
from diptych.kvtransfer.receiver import DecodeReceiver
from diptych.kvtransfer.sender import PrefillSender
from diptych.kvtransfer.settings import TransferSettings
from diptych.kvtransfer.stats import TransferStats
from diptych.prefill.optimistic import OptimisticPrompts
from diptych.prefill.scheduler import PrefillScheduler

CPU = torch.device("cpu")
PAGE_SIZE = 4
VOCAB = 300


class Sample:
    """What a frontend has heard of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cached_tokens = 0
        self.finish: Finish | None = None


def fingerprint(layout: KVLayout, weights: str) -> Fingerprint:
    return Fingerprint(
        model=weights,
        dtype="float32",
        kv_dtype="float32",
        num_layers=layout.num_layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        vocab_size=VOCAB,
    )


class Side:
    """A scheduler with its frontend's end of the socket and what it has answered, by request id."""

    def __init__(self, cell: Cell, num_pages: int) -> None:
        model = cell.model
        pool = KVPool(model.config.kv_layout(PAGE_SIZE, "float32"), num_pages, device=CPU, cache=True)
        backend = make_attention_backend("torch_native", pool.slab, num_q_heads=4, scale=model.config.scale)
        facts = RunnerFacts("x", "x", "float32", "float32", 256, "dummy", "plain", True, False)
        runner = ModelRunner(
            model, pool, prefill_backend=backend, decode_backend=backend, device=CPU, facts=facts
        )
        address = f"inproc://side-{next(cell.numbers)}"
        self._frontend = cell.context.socket(zmq.PAIR)
        self._frontend.bind(address)
        self._link = FrontendLink(cell.context, address)
        self._alive = os.pipe()
        self.registry = CollectorRegistry()
        self.pool = pool
        self.samples: defaultdict[str, Sample] = defaultdict(Sample)
        self.faults = Injector(TransferStats(CollectorRegistry(), backend="fake"))
        """Of its gates alone: what it sends and writes is as it should be."""
        self.other_weights: dict[str, NewWeights] = {}
        """By directory, what it can be told to load."""
        self.replies: list[ActionReply] = []
        self.parts = SchedulerParts(
            runner=runner,
            frontend=self._link,
            registry=self.registry,
            parent_fd=self._alive[0],
            max_requests=1000,
            speculative_algorithm="none",
            load_weights=self._load_weights,
            grammars=cell.make_grammars(),
            faults=self.faults,
        )
        self.scheduler: Scheduler
        self.transfer: PrefillSender | DecodeReceiver

    def _load_weights(self, model_dir: Path, load_format: str) -> NewWeights:
        if str(model_dir) not in self.other_weights:
            raise WeightsRefused(f"there are none in {model_dir}")
        return self.other_weights[str(model_dir)]

    def send(self, message: FrontendMessage) -> None:
        self._frontend.send(encode(message))

    def turn(self) -> bool:
        busy = self.scheduler.turn(0.0)
        while self._frontend.poll(0):
            batch = decode_reply(self._frontend.recv())
            if isinstance(batch, ActionReply):
                self.replies.append(batch)
                continue
            assert isinstance(batch, OutputBatch)
            for output in batch.outputs:
                sample = self.samples[output.rid]
                assert sample.finish is None, f"{output.rid}: news after the end"
                sample.tokens += output.token_ids
                sample.cached_tokens = output.cached_tokens
                sample.finish = output.finish
        return busy

    def metric(self, name: str) -> float:
        return self.registry.get_sample_value(name) or 0.0

    def at_baseline(self) -> bool:
        """No page is held or in doubt, and nobody waits for anything."""
        self.pool.check()
        allocator = self.pool.allocator
        return not (self.scheduler.requests or allocator.held or allocator.quarantined)

    def close(self) -> None:
        self.scheduler.close()
        self.transfer.close()
        self._link.close()
        self._frontend.close(0)
        for descriptor in self._alive:
            os.close(descriptor)


class PrefillSide(Side):
    scheduler: PrefillScheduler
    transfer: PrefillSender
    port: int
    """What decode looks it up by."""
    register: Callable[[Fingerprint], None]
    """At its bootstrap service, as serving these weights."""


class DecodeSide(Side):
    scheduler: DecodeScheduler
    transfer: DecodeReceiver


class Cell:
    """Workers on one fabric. Only those that are asked to take turns: the rest are stuck."""

    def __init__(self, model: DecoderLM, make_grammars: Callable[[], Grammars | None] = lambda: None) -> None:
        self.model = model
        self.make_grammars = make_grammars
        """Called for each worker."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.numbers = itertools.count(1)
        self.fabric = FakeFabric()
        self.sides: list[Side] = []
        self.routes: dict[tuple[str, int], Route] = {}
        self.passed = 0.0
        """Seconds the transfer clock is ahead of the real one: deadlines pass when a test says."""
        self.settings = TransferSettings(
            handshake_timeout=20,
            bootstrap_timeout=20,
            receive_timeout=20,
            transfer_timeout=20,
            heartbeat_interval=20,
        )

    def prefill(
        self, *, pages: int = 64, budget: int = 16, max_running: int = 8, optimistic: float = 1.0
    ) -> PrefillSide:
        side = PrefillSide(self, pages)
        sender = PrefillSender(self._parts(side))
        side.transfer = sender
        port = 9000 + next(self.numbers)
        self.routes["prefill", port] = _route(sender.route(worker_id=f"w{port}"))
        side.port = port
        side.register = lambda weights: self.routes.update(
            {("prefill", port): _route(sender.route(worker_id=f"w{port}").with_weights(weights))}
        )
        side.scheduler = PrefillScheduler(
            side.parts,
            sender,
            self._queue(side, budget),
            OptimisticPrompts(self._queue(side, budget), side.pool, max_pages=int(optimistic * pages)),
            max_running=max_running,
            overlap_transfer=True,
        )
        self.sides.append(side)
        return side

    def decode(
        self,
        *,
        pages: int = 64,
        max_running: int = 8,
        reserved_tokens: int = 0,
        receiving: float = 1.0,
        retracted_timeout: float = 20,
    ) -> DecodeSide:
        side = DecodeSide(self, pages)
        side.transfer = DecodeReceiver(self._parts(side))
        side.scheduler = DecodeScheduler(
            side.parts,
            side.transfer,
            RunningBatch(side.pool, reserved_tokens=reserved_tokens),
            max_running=max_running,
            max_receiving_fraction=receiving,
            retracted_timeout=retracted_timeout,
            default_bootstrap_port=1,
        )
        self.sides.append(side)
        return side

    def _queue(self, side: Side, budget: int) -> PromptQueue:
        return PromptQueue(
            side.pool, token_budget=budget, chunked=True, reuse_prefix=True, keep_free=lambda: 0
        )

    def _parts(self, side: Side) -> TransferParts:
        layout = side.pool.layout
        identity = Identity.current()
        stats = TransferStats(side.registry, backend="fake")
        background = BackgroundPool(threads=1, name="test")
        return TransferParts(
            backend=FakeBackend(
                side.pool.slab, page_bytes=layout.page_bytes, agent=identity.instance_id, fabric=self.fabric
            ),
            checksums=PageChecksums(side.pool.slab, page_bytes=layout.page_bytes),
            control=ControlEndpoint(identity, "127.0.0.1", 0, self.settings.heartbeat_interval, stats),
            fingerprint=fingerprint(layout, "tiny"),
            identity=identity,
            settings=self.settings,
            stats=stats,
            background=background,
            clock=lambda: time.monotonic() + self.passed,
            lookup=RouteLookup(background, fetch=self._fetch),
            probe=DeathProbe(background),
        )

    def _fetch(self, host: str, port: int) -> Route:
        try:
            return self.routes[host, port]
        except KeyError as error:
            raise LookupFailed(f"no worker at {host}:{port}", retry=False) from error

    def request(
        self,
        prompt: list[int],
        *legs: PrefillSide | DecodeSide,
        of: PrefillSide,
        tokens: int = 4,
        rid: str | None = None,
        room: int | None = None,
        grammar: Grammar | None = None,
    ) -> str:
        """Send a greedy request to these workers, with `of` as its prefill worker; returns its id."""
        number = next(self.numbers)
        message = Generate(
            rid=rid or f"r{number}",
            prompt_ids=prompt,
            sampling=SamplingParams(
                max_new_tokens=tokens, seed=0, temperature=0, ignore_eos=True, grammar=grammar
            ),
            room=room or number,
            bootstrap_host="prefill",
            bootstrap_port=of.port,
        )
        for leg in legs:
            leg.send(message)
        return message.rid

    def until(
        self, condition: Callable[[], bool], *sides: Side, seconds: float = 10, stuck: Side | None = None
    ) -> None:
        """Let `sides` (default: all but `stuck`) take turns until the condition holds; fails otherwise."""
        moving = [side for side in sides or self.sides if side is not stuck]
        give_up = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < give_up, [side.scheduler.load() for side in self.sides]
            if not any([side.turn() for side in moving]):
                _wait(moving)

    def introduce(self, prefill: PrefillSide, decode: DecodeSide, ids: list[int] | None = None) -> None:
        """Serve one request (of the prompt `ids`), so that the two know each other."""
        rid = self.request(ids or prompt(3, 200), prefill, decode, of=prefill, tokens=1)
        self.until(lambda: decode.samples[rid].finish is not None)
        self.settle()

    def wait_for_news(self, side: Side) -> None:
        """A message is there, and nobody has read it."""
        assert _wait([side], 5)

    def settle(self, *sides: Side) -> None:
        """Turns until nobody has anything more to compute and no message is on its way any more."""
        moving = list(sides or self.sides)
        quiet = 0
        while quiet < 3:
            busy = any([side.turn() for side in moving])
            quiet = 0 if busy or _wait(moving, 0.02) else quiet + 1

    def answer(self, prompt: list[int], tokens: int = 4) -> list[int]:
        """The greedy tokens of a prompt, by itself on workers of its own."""
        cell = Cell(self.model)
        prefill, decode = cell.prefill(pages=64, optimistic=0), cell.decode(pages=64)
        rid = cell.request(prompt, prefill, decode, of=prefill, tokens=tokens)
        cell.until(lambda: decode.samples[rid].finish is not None)
        answer = decode.samples[rid].tokens
        cell.close()
        return answer

    def close(self) -> None:
        for side in self.sides:
            side.close()
        self.context.term()


def _wait(sides: list[Side], seconds: float = 0.2) -> bool:
    """Sleep until a socket of theirs has news or a deadline is near; whether there is news."""
    poller = zmq.Poller()
    waits = [seconds]
    for side in sides:
        for source in (*side.scheduler.pollables(), *side.scheduler._waiting.pollables()):
            poller.register(source, zmq.POLLIN)
        wait = side.scheduler.wait_seconds()
        waits.append(seconds if wait is None else wait)
    return bool(poller.poll(1 + min(waits) * 1000))


def _route(rank: RankRoute) -> Route:
    address = RankAddress(rank=0, identity=rank.identity, control_address=rank.control_address)
    return Route(
        version=rank.version,
        worker_id=rank.worker_id,
        fingerprint=rank.fingerprint,
        backend=rank.backend,
        ranks=[address],
    )


def prompt(length: int, start: int = 0) -> list[int]:
    """Prompts of different starts share no page."""
    return [(start * 31 + 7 * i * (start + 1) + start) % VOCAB for i in range(length)]
