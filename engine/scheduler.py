"""The event loop that every scheduler shares: receive → admit → schedule → forward → process.

A role says what a new request does first (`admit`), what one turn of work is (`advance`), how an abort ends
a request (`abort`) and which sockets besides the frontend's can bring news.
"""

from __future__ import annotations

import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import zmq
from prometheus_client import CollectorRegistry

from diptych.common_config import readback
from diptych.engine.faults import FaultControl, Gate
from diptych.engine.frontend_link import FrontendLink
from diptych.engine.grammar import GrammarRefused, Grammars, Matcher, WaitingForGrammar
from diptych.engine.kv_layout import Fingerprint
from diptych.engine.kv_pool import KVPool
from diptych.engine.metrics import EngineMetrics
from diptych.engine.operator_calls import OperatedEngine, OperatorCalls
from diptych.engine.request import Request
from diptych.engine.runner import ModelRunner
from diptych.engine.sampling import SampledToken, SamplingState
from diptych.engine.stepper import STEPPERS
from diptych.engine.weight_update import LoadWeights, NewWeights, WeightUpdates
from diptych.engine.wire import (
    Abort,
    Drain,
    Finish,
    FrontendMessage,
    Generate,
    OutputBatch,
    SchedulerReady,
    TokenOutput,
)

log = logging.getLogger(__name__)


class RequestRefused(Exception):
    """A request that can't be taken; becomes a `Finish` of kind error for that request alone."""

    def __init__(self, message: str, *, status: int, param: str | None = None) -> None:
        super().__init__(message)
        self.finish = Finish(kind="error", message=message, status=status, param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParts:
    """What every role's scheduler is composed of."""

    runner: ModelRunner
    frontend: FrontendLink
    registry: CollectorRegistry
    parent_fd: int
    """Reads end-of-file when the frontend is gone."""
    max_requests: int
    """Running and queued together; one more is refused."""
    speculative_algorithm: str
    """A name of `stepper.STEPPERS`."""
    load_weights: LoadWeights
    grammars: Grammars | None = None
    """None refuses requests with a grammar."""
    faults: FaultControl | None = None
    """None unless fault injection is on."""


class Scheduler(ABC):
    """One rank's loop. Single-threaded: everything below happens on the thread that calls `run`."""

    def __init__(self, parts: SchedulerParts) -> None:
        self.runner = parts.runner
        self.pool: KVPool = parts.runner.pool
        self.metrics = EngineMetrics(parts.registry)
        self.metrics.follow(self._whole_load)
        self.requests: dict[str, Request] = {}
        self.max_requests = parts.max_requests
        self._frontend = parts.frontend
        self._parent_fd = parts.parent_fd
        self._faults = parts.faults
        self._waiting = WaitingForGrammar(parts.grammars)
        self._operator = OperatorCalls(
            OperatedEngine(
                num_requests=lambda: len(self.requests),
                settled=self.settled,
                flush_cache=self.pool.flush_cache,
                metrics=self.metrics.exposition,
                load=self._whole_load,
                # What was asked, what is in effect, and what the runner was built with.
                config=lambda: {**readback(), "runner": asdict(self.runner.facts)},
                adopt=self._adopt,
            ),
            parts.frontend.send,
            WeightUpdates(parts.load_weights),
            parts.faults,
        )
        self.stepper = STEPPERS[parts.speculative_algorithm](self.runner, self.metrics)
        self._outputs: list[TokenOutput] = []
        self._draining = False
        self._stopped = False
        self._checked_idle = True

    # ---- what a role adds -----------------------------------------------------------------------------

    @abstractmethod
    def make_request(self, message: Generate, state: SamplingState) -> Request: ...

    @abstractmethod
    def admit(self, request: Request) -> None:
        """Take a new request. Raises `RequestRefused`."""

    @abstractmethod
    def abort(self, request: Request, finish: Finish) -> None:
        """End a request early, give back its pages (or quarantine them) and `finish` it."""

    @abstractmethod
    def advance(self) -> bool:
        """One turn of work; True if there may be more to compute at once."""

    @abstractmethod
    def load(self) -> dict[str, int]:
        """See `wire.StateReply.load`."""

    def _whole_load(self) -> dict[str, int]:
        """With those who wait for their grammar."""
        load = self.load()
        return load | {"num_waiting_reqs": load["num_waiting_reqs"] + len(self._waiting)}

    def wait_seconds(self) -> float | None:
        """How long the loop may sleep without news; None is for ever."""
        return None

    def pollables(self) -> Sequence[zmq.Socket[bytes] | int]:
        """Sockets and file descriptors, besides the frontend's, that can bring news; asked at each wait."""
        return ()

    def weights_changed(self, fingerprint: Fingerprint) -> None:
        """Other weights are in use from now on, and this is what peers must have in common with them."""
        return

    def settled(self) -> bool:
        """With no request left: whether every page that a transfer may still touch has been given back."""
        return True

    # ---- the loop -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the frontend is gone or asks to drain and everything has ended."""
        self._frontend.send(
            SchedulerReady(
                pid=os.getpid(),
                context_length=self.runner.facts.context_length,
                vocab_size=self.runner.model.config.vocab_size,
                max_total_tokens=self.pool.allocator.total * self.pool.layout.page_size,
                eos_token_ids=list(self.runner.model.config.eos_token_ids),
            )
        )
        busy = False
        while not self._stopped:
            busy = self.turn(0.0 if busy else self.wait_seconds())

    def turn(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds for news (None: for ever), then work; True if there may be more to
        compute at once."""
        self._receive(timeout)
        self._take_compiled()
        self._operator.finish_update()
        busy = self.advance()
        if busy:
            self._operator.profiler.step()
        self._flush_outputs()
        if not self.requests:
            self._when_idle()
        return busy

    def _receive(self, timeout: float | None) -> None:
        poller = zmq.Poller()
        own = (self._frontend.socket, self._parent_fd, self._operator.weights, *self._waiting.pollables())
        for source in (*own, *self.pollables()):
            poller.register(source, zmq.POLLIN)
        # ZMQ counts whole milliseconds: round up, or the last fraction of a wait becomes a busy loop.
        ready = dict(poller.poll(None if timeout is None else math.ceil(timeout * 1000)))
        if self._parent_fd in ready:
            log.warning("the frontend is gone; stopping")
            self._stopped = True
            return
        for message in self._frontend.receive():
            self._handle(message)

    def _handle(self, message: FrontendMessage) -> None:
        match message:
            case Generate():
                self._take(message)
            case Abort(rid=rid, reason=reason, quiet=quiet):
                request = self.requests.get(rid)
                if self._waiting.remove(rid):
                    self._refuse(rid, Finish(kind="abort", message=reason), "abort", tell=not quiet)
                elif request is not None:
                    self.abort(request, Finish(kind="abort", message=reason))
                    if quiet:
                        self._outputs = [output for output in self._outputs if output.rid != rid]
            case Drain():
                self._draining = True
            case _:
                self._operator.handle(message)

    def _take(self, message: Generate) -> None:
        try:
            if message.rid in self.requests or message.rid in self._waiting:
                raise RequestRefused(
                    f"request id {message.rid!r} is already running", status=409, param="rid"
                )
            if self._draining:
                raise RequestRefused("the worker is shutting down", status=503)
            if len(self.requests) + len(self._waiting) >= self.max_requests:
                raise RequestRefused(f"the queue is full ({self.max_requests} requests)", status=429)
            self._require_room_for(message)
            matcher = None
            if message.sampling.grammar is not None:
                matcher = self._waiting.matcher(message)
                if matcher is None:
                    return
            self._admit(message, matcher)
        except GrammarRefused as refusal:
            finish = RequestRefused(refusal.message, status=refusal.status, param=refusal.param).finish
            self._refuse(message.rid, finish, "refused")
        except RequestRefused as refusal:
            self._refuse(message.rid, refusal.finish, "refused")

    def _admit(self, message: Generate, matcher: Matcher | None) -> None:
        """Raises `RequestRefused`."""
        if problem := self._operator.refuses_requests():
            raise RequestRefused(problem, status=503)
        request = self.make_request(message, self._sampling_state(message, matcher))
        self.admit(request)
        self.requests[message.rid] = request
        self._checked_idle = False

    def _refuse(self, rid: str, finish: Finish, label: str, *, tell: bool = True) -> None:
        if tell:
            self._outputs.append(TokenOutput(rid=rid, finish=finish))
        self.metrics.finished.labels(label).inc()

    def _take_compiled(self) -> None:
        """Requests whose grammar is there now, or known to be none, go on where they were held."""
        for message, outcome in self._waiting.finished():
            try:
                if isinstance(outcome, GrammarRefused):
                    raise RequestRefused(outcome.message, status=outcome.status, param=outcome.param)
                self._admit(message, outcome)
            except RequestRefused as refusal:
                self._refuse(message.rid, refusal.finish, "refused")

    def _require_room_for(self, message: Generate) -> None:
        capacity = self.pool.allocator.total * self.pool.layout.page_size
        if self.pool.layout.pages_for(len(message.prompt_ids)) > self.pool.allocator.total:
            raise RequestRefused(
                f"the prompt has {len(message.prompt_ids)} tokens; "
                f"the KV pool of this worker holds {capacity}",
                status=400,
                param="prompt",
            )

    def _sampling_state(self, message: Generate, matcher: Matcher | None) -> SamplingState:
        config = self.runner.model.config
        try:
            return SamplingState(
                message.sampling,
                message.prompt_ids,
                eos_token_ids=config.eos_token_ids,
                vocab_size=config.vocab_size,
                device=self.pool.slab.device,
                grammar=matcher,
            )
        except ValueError as error:
            raise RequestRefused(str(error), status=400, param="logit_bias") from error

    def _adopt(self, weights: NewWeights) -> None:
        """Nothing runs, and nothing that was computed with the old weights may be used again."""
        assert not self.requests
        self.runner.model = weights.model
        self.pool.flush_cache()
        self.weights_changed(weights.fingerprint)

    def close(self) -> None:
        """After `run`."""
        self._operator.close()
        self._waiting.close()

    def _flush_outputs(self) -> None:
        if self._outputs:
            self._frontend.send(OutputBatch(outputs=self._outputs))
            self._outputs = []

    def _when_idle(self) -> None:
        """Nothing runs: whatever the pool still counts as held is a leak; say so once."""
        if not self._checked_idle and self.settled():
            self._checked_idle = True
            try:
                self.pool.check()
                assert self.pool.allocator.held == 0, f"{self.pool.allocator.held} pages are held by nobody"
            except AssertionError as error:
                self.metrics.accounting_errors.inc()
                log.error("page accounting is wrong while idle: %s", error)
        if self._draining and not self._waiting and self.settled():
            self._stopped = True

    # ---- pieces of a turn that roles compose ----------------------------------------------------------

    def may(self, gate: Gate) -> bool:
        """Whether this step may happen now: always, unless an operator or fault injection holds it."""
        if gate == "compute" and self._operator.paused:
            return False
        return self._faults is None or self._faults.may(gate)

    def accept(self, request: Request, token: SampledToken | None) -> Finish | None:
        """Append a token to a request and tell the client; the reason when the request is now complete, or an
        error when its grammar can't be followed.

        The caller ends a completed request with `retire`.
        """
        first = not request.output_ids
        finish: Finish | None = Finish(kind="length")
        if token is not None:
            request.accept(token.token_id)
            finish = request.state.finish_reason()
            if finish is not None and finish.kind == "error":
                token = None
        wants_prompt = first and request.params.prompt_logprobs is not None
        self._outputs.append(
            TokenOutput(
                rid=request.rid,
                token_ids=[] if token is None else [token.token_id],
                logprobs=None if token is None or token.logprob is None else [token.logprob],
                finish=finish,
                prompt_logprobs=request.prompt_logprobs if wants_prompt else None,
                cached_tokens=request.cached_tokens,
            )
        )
        return finish

    def send_output(self, output: TokenOutput) -> None:
        """Leaves with everything else at the end of the turn."""
        self._outputs.append(output)

    def outgrown(self, request: Request) -> Finish:
        """For a request that needs more pages than the whole pool has."""
        return Finish(
            kind="error",
            message=f"the request has grown to {request.num_tokens} tokens; the KV pool of this worker holds "
            f"{self.pool.allocator.total * self.pool.layout.page_size}",
            status=400,
            param="max_tokens",
        )

    def retire(self, request: Request, finish: Finish, *, tell: bool = True) -> None:
        """The request is over: forget it. Its pages are already given back or answered for elsewhere."""
        if self.requests.pop(request.rid, None) is None:
            return
        self.metrics.finished.labels(finish.kind).inc()
        if tell:
            self._outputs.append(
                TokenOutput(rid=request.rid, finish=finish, cached_tokens=request.cached_tokens)
            )
