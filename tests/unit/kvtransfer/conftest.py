"""Two real managers over real ZMQ in one process, with pages travelling through the fake backend."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
import zmq
from aiohttp import web
from prometheus_client import CollectorRegistry

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer.backends.fake import FakeBackend, FakeFabric
from diptych.kvtransfer.bootstrap.client import register
from diptych.kvtransfer.bootstrap.service import make_bootstrap_app
from diptych.kvtransfer.checksum import PageChecksums
from diptych.kvtransfer.cluster import ClusterKeys
from diptych.kvtransfer.control import ControlEndpoint
from diptych.kvtransfer.events import TransferEvent
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.parts import TransferParts, real_parts
from diptych.kvtransfer.receiver import DecodeReceiver
from diptych.kvtransfer.sender import PrefillSender
from diptych.kvtransfer.settings import TransferSettings
from diptych.kvtransfer.stats import TransferStats
from diptych.kvtransfer.wire import AuxBlock

PAGE_SIZE = 4
PAGE_BYTES = 64
NUM_PAGES = 32


def make_fingerprint(**changes: object) -> Fingerprint:
    values: dict[str, object] = {
        "model": "m",
        "dtype": "float32",
        "kv_dtype": "float32",
        "num_layers": 1,
        "kv_heads": 1,
        "head_dim": 2,
        "page_size": PAGE_SIZE,
        "vocab_size": 100,
    }
    return Fingerprint(**(values | changes))  # type: ignore[arg-type]


class Service:
    """A bootstrap service in its own thread and event loop, as a prefill frontend runs it."""

    def __init__(self, port: int = 0, keys: ClusterKeys | None = None) -> None:
        self._keys = keys
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._wanted = port
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(5)

    def _run(self) -> None:
        async def start() -> web.AppRunner:
            runner = web.AppRunner(make_bootstrap_app(self._keys))
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", self._wanted)
            await site.start()
            self.port = runner.addresses[0][1]
            return runner

        runner = self._loop.run_until_complete(start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)


@dataclass
class Side:
    """A manager with its slab and what it has reported."""

    manager: PrefillSender | DecodeReceiver
    slab: torch.Tensor
    registry: CollectorRegistry
    identity: Identity
    events: list[TransferEvent] = field(default_factory=list)

    def metric(self, name: str, **labels: str) -> float:
        return (
            self.registry.get_sample_value(f"diptych_transfer_{name}", {"backend": "fake", **labels}) or 0.0
        )


class Pair:
    """Steps every manager the way a scheduler does: one poller over all of them, no sleeping."""

    def __init__(self) -> None:
        self.fabric = FakeFabric()
        self.service = Service()
        self.keys: ClusterKeys | None = None
        """Of the sides that are made from now on."""
        self.sides: list[Side] = []
        self.around: Callable[[TransferParts], TransferParts] = lambda parts: parts
        """What each side's parts are wrapped in."""
        self.settings = TransferSettings(
            handshake_timeout=3,
            bootstrap_timeout=3,
            receive_timeout=3,
            transfer_timeout=3,
            heartbeat_interval=0.2,
        )

    def _side(
        self,
        make: Callable[[TransferParts], PrefillSender | DecodeReceiver],
        *,
        port: int = 0,
        fingerprint: Fingerprint | None = None,
    ) -> Side:
        slab = torch.randint(0, 255, (NUM_PAGES, PAGE_BYTES), dtype=torch.uint8)
        registry = CollectorRegistry()
        identity = Identity.current()
        backend = FakeBackend(slab, page_bytes=PAGE_BYTES, agent=identity.instance_id, fabric=self.fabric)
        stats = TransferStats(registry, backend="fake")
        heartbeat = self.settings.heartbeat_interval
        parts = self.around(
            real_parts(
                backend=backend,
                checksums=PageChecksums(slab, page_bytes=PAGE_BYTES),
                control=ControlEndpoint(identity, "127.0.0.1", port, heartbeat, stats, self.keys),
                fingerprint=fingerprint or make_fingerprint(),
                identity=identity,
                settings=self.settings,
                stats=stats,
                keys=self.keys,
            )
        )
        side = Side(make(parts), slab, registry, identity)
        self.sides.append(side)
        return side

    def prefill(
        self, *, registered: bool = True, port: int = 0, fingerprint: Fingerprint | None = None
    ) -> Side:
        side = self._side(PrefillSender, port=port, fingerprint=fingerprint)
        if registered:
            self.register(side)
        return side

    def register(self, side: Side) -> None:
        assert isinstance(side.manager, PrefillSender)
        route = side.manager.route(worker_id=side.identity.instance_id)
        register("127.0.0.1", self.service.port, route, timeout=2, keys=self.keys)

    def decode(self, *, port: int = 0, fingerprint: Fingerprint | None = None) -> Side:
        return self._side(DecodeReceiver, port=port, fingerprint=fingerprint)

    def run_until(self, condition: Callable[[], bool], timeout: float = 8.0) -> None:
        """Step all sides until the condition holds; fails the test otherwise."""
        give_up = time.monotonic() + timeout
        while True:
            for side in self.sides:
                side.events += side.manager.step()
            if condition():
                return
            now = time.monotonic()
            assert now < give_up, [side.events for side in self.sides]
            poller = zmq.Poller()
            for side in self.sides:
                for pollable in side.manager.pollables():
                    poller.register(pollable, zmq.POLLIN)
            deadlines = [d for s in self.sides if (d := s.manager.next_deadline()) is not None]
            wait = min([*deadlines, give_up]) - now
            if any(side.manager.busy for side in self.sides):
                wait = min(wait, 0.002)
            poller.poll(max(0.0, wait) * 1000 + 1)

    def run_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for side in self.sides:
                side.events += side.manager.step()
            poller = zmq.Poller()
            for side in self.sides:
                for pollable in side.manager.pollables():
                    poller.register(pollable, zmq.POLLIN)
            poller.poll(min(left * 1000, 20))

    def drop(self, side: Side) -> None:
        side.manager.close()
        self.sides.remove(side)

    def close(self) -> None:
        for side in list(self.sides):
            self.drop(side)
        self.service.stop()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def of(side: Side, kind: type, room: int) -> list[TransferEvent]:
    return [event for event in side.events if isinstance(event, kind) and event.room == room]


def aux(room: int, prompt_tokens: int = 12) -> AuxBlock:
    return AuxBlock(room=room, prompt_tokens=prompt_tokens, cached_tokens=4, first_token=7)
