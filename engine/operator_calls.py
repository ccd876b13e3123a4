"""What operators ask of a running scheduler: its state, and orders that change how it goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diptych.engine.faults import FaultControl
from diptych.engine.profiler import NotProfiling, StepProfiler
from diptych.engine.weight_update import NewWeights, WeightUpdates
from diptych.engine.wire import (
    ActionReply,
    Call,
    ContinueGeneration,
    Faults,
    FaultsReply,
    FlushCache,
    GetState,
    PauseGeneration,
    SchedulerMessage,
    SetLogLevel,
    StartProfile,
    StateReply,
    StopProfile,
    UpdateWeights,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatedEngine:
    """The scheduler, as seen from here."""

    num_requests: Callable[[], int]
    settled: Callable[[], bool]
    flush_cache: Callable[[], int]
    """Returns the number of pages dropped."""
    metrics: Callable[[], str]
    load: Callable[[], dict[str, int]]
    config: Callable[[], Mapping[str, object]]
    adopt: Callable[[NewWeights], None]
    """Compute with these from now on."""


class OperatorCalls:
    def __init__(
        self,
        engine: OperatedEngine,
        send: Callable[[SchedulerMessage], None],
        weights: WeightUpdates,
        faults: FaultControl | None,
    ) -> None:
        self._engine = engine
        self._send = send
        self._faults = faults
        self.weights = weights
        self.profiler = StepProfiler()
        self.paused = False

    def refuses_requests(self) -> str | None:
        """Why no new request can be taken now, although later it can."""
        return "the weights are being replaced" if self.weights.pending else None

    def handle(self, message: Call | SetLogLevel) -> None:
        match message:
            case FlushCache(call_id=call_id):
                problem = self._busy()
                done = "" if problem else f"{self._engine.flush_cache()} pages dropped"
                self._answer(call_id, problem, done)
            case GetState(call_id=call_id):
                self._send(
                    StateReply(
                        call_id=call_id,
                        metrics=self._engine.metrics(),
                        load=self._engine.load(),
                        config=dict(self._engine.config()),
                    )
                )
            case PauseGeneration(call_id=call_id):
                self.paused = True
                log.info("paused: nothing is computed")
                self._answer(call_id, None, "paused")
            case ContinueGeneration(call_id=call_id):
                self.paused = False
                log.info("computing again")
                self._answer(call_id, None, "computing")
            case UpdateWeights():
                self._start_update(message)
            case StartProfile():
                self._start_profile(message)
            case StopProfile(call_id=call_id):
                self._stop_profile(call_id)
            case Faults(call_id=call_id, change=change):
                assert self._faults is not None, "the frontend has this route only with fault injection"
                if change is not None:
                    self._faults.change(change)
                self._send(FaultsReply(call_id=call_id, report=self._faults.report()))
            case SetLogLevel(level=level):
                logging.getLogger().setLevel(level.upper())
                log.info("log level is now %s", level)

    def finish_update(self) -> None:
        """Put weights that have been loaded in place. Nothing runs: requests were refused meanwhile."""
        loaded = self.weights.take()
        if loaded is None:
            return
        if loaded.weights is None:
            self._answer(loaded.call_id, loaded.problem)
            return
        self._engine.adopt(loaded.weights)
        identity = loaded.weights.fingerprint.model
        log.info("serving the weights %s", identity)
        self._answer(loaded.call_id, None, identity)

    def close(self) -> None:
        self.weights.close()

    def _start_update(self, message: UpdateWeights) -> None:
        if self.weights.pending:
            self._answer(message.call_id, "the weights are being replaced already", status=409)
        elif problem := self._busy():
            self._answer(message.call_id, f"{problem}; weights are replaced while nothing runs", status=409)
        else:
            self.weights.start(message.call_id, message.model_dir, message.load_format)

    def _start_profile(self, message: StartProfile) -> None:
        if self.profiler.running:
            self._answer(message.call_id, "a profile is being recorded already", status=409)
            return
        self.profiler.start(
            message.path,
            num_steps=message.num_steps,
            record_shapes=message.record_shapes,
            with_stack=message.with_stack,
        )
        self._answer(message.call_id, None, message.path)

    def _stop_profile(self, call_id: int) -> None:
        try:
            path = self.profiler.stop()
        except NotProfiling as error:
            self._answer(call_id, str(error), status=409)
        except (OSError, RuntimeError) as error:
            self._answer(call_id, f"the trace could not be written: {error}", status=500)
        else:
            self._answer(call_id, None, path)

    def _busy(self) -> str | None:
        if number := self._engine.num_requests():
            return f"{number} requests are running"
        return None if self._engine.settled() else "a failed transfer is still draining"

    def _answer(self, call_id: int, problem: str | None, done: str = "", *, status: int = 400) -> None:
        self._send(ActionReply(call_id=call_id, ok=problem is None, message=problem or done, status=status))
