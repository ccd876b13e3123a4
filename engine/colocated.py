"""A scheduler that does both phases with the same engine and no transfer: the honest baseline, and the
oracle that disaggregated output must equal."""

from __future__ import annotations

from diptych.engine.prompt_queue import PromptQueue
from diptych.engine.request import Request
from diptych.engine.running_batch import RunningBatch
from diptych.engine.sampling import SamplingState
from diptych.engine.scheduler import Scheduler, SchedulerParts
from diptych.engine.wire import Finish, Generate


class ColocatedScheduler(Scheduler):
    """Each turn computes one step of prompt chunks, then one decode step."""

    def __init__(
        self, parts: SchedulerParts, queue: PromptQueue, batch: RunningBatch, *, max_running: int
    ) -> None:
        super().__init__(parts)
        self._queue = queue
        self._batch = batch
        self._max_running = max_running

    def make_request(self, message: Generate, state: SamplingState) -> Request:
        return Request(message, state)

    def admit(self, request: Request) -> None:
        self._queue.add(request)

    def abort(self, request: Request, finish: Finish) -> None:
        self._queue.remove(request)
        self._end(request, finish)

    def advance(self) -> bool:
        if not self.may("compute"):
            return False
        self._batch.resume()
        computed = self._prefill()
        retracted, too_big = self._batch.make_room()
        self.metrics.retractions.inc(len(retracted))
        for request in too_big:
            self._end(request, self.outgrown(request))
        running = list(self._batch.running)
        if not running:
            return computed
        for request, token in zip(running, self.stepper.decode(running), strict=True):
            finish = self.accept(request, token)
            if finish is not None:
                self._end(request, finish, tell=False)
        return True

    def _prefill(self) -> bool:
        """One step of prompt chunks; parked requests come before new prompts."""
        started = len(self._queue) - self._queue.num_waiting
        free_places = self._max_running - len(self._batch) - started
        plan = self._queue.plan(max_admit=0 if self._batch.parked else max(0, free_places))
        for request in plan.admitted:
            self.metrics.cached_tokens.inc(request.cached_tokens)
        if not plan.chunks:
            return False
        tokens = self.stepper.prefill(plan.chunks)
        for request, token in zip(self._queue.completed(plan.chunks), tokens, strict=True):
            assert request.match is not None
            request.match = self.pool.cache(request.prompt_ids, request.pages.tolist(), request.match)
            finish = self.accept(request, token)
            if finish is None:
                self._batch.add(request)
            else:
                self._end(request, finish, tell=False)
        return True

    def _end(self, request: Request, finish: Finish, *, tell: bool = True) -> None:
        """Offer what was computed to the prefix cache and give back the rest."""
        self._batch.remove(request)
        if request.match is not None and request.prefilled:
            tokens = (request.prompt_ids + request.output_ids)[: request.num_computed]
            request.match = self.pool.cache(tokens, request.pages.tolist(), request.match)
        self.pool.release(request.take_pages(), request.match)
        self.retire(request, finish, tell=tell)

    def load(self) -> dict[str, int]:
        counts = self.pool.counts()
        running = len(self._batch.running)
        return counts | {
            "num_running_reqs": running,
            "num_waiting_reqs": len(self.requests) - running,
            "num_used_tokens": counts["pages_held"] * self.pool.layout.page_size,
        }
