"""The prefill worker's scheduler: compute prompts chunk by chunk, push their pages as they become final.

Prompts whose destination is known come first, in the order of their reservations. What is left over goes to
prompts that still wait for one (`prefill/optimistic.py`): the sender writes their pages once it can.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import zmq

from diptych.engine.kv_layout import Fingerprint
from diptych.engine.prompt_queue import PrefillPlan, PromptQueue
from diptych.engine.radix_cache import PrefixMatch
from diptych.engine.request import Request
from diptych.engine.sampling import SampledToken, SamplingState
from diptych.engine.scheduler import RequestRefused, Scheduler, SchedulerParts
from diptych.engine.wire import Finish, Generate, TokenOutput
from diptych.kvtransfer.errors import DuplicateRoom, UnknownRoom
from diptych.kvtransfer.events import DestinationReady, Drained, Failed, Sent, TransferEvent
from diptych.kvtransfer.outcome import CLIENT_CLOSED_REQUEST, transfer_finish
from diptych.kvtransfer.sender import PrefillSender
from diptych.prefill.optimistic import OptimisticPrompts
from diptych.prefill.request import PrefillRequest, PrefillState

# With a transfer library that can't wake a poller, writes in flight are asked after this often.
POLL_SECONDS = 0.001


@dataclass(slots=True)
class DrainingPages:
    """Pages of a failed request that the transfer library may still be reading."""

    pages: list[int]
    match: PrefixMatch | None


class PrefillScheduler(Scheduler):
    def __init__(
        self,
        parts: SchedulerParts,
        sender: PrefillSender,
        queue: PromptQueue,
        optimistic: OptimisticPrompts,
        *,
        max_running: int,
        overlap_transfer: bool,
    ) -> None:
        """`max_running`: prompts that compute or have pages in flight at once. `overlap_transfer`: pages
        leave as they become final, while later chunks are computed; else once the prompt is whole."""
        super().__init__(parts)
        self._max_running = max_running
        self._overlap_transfer = overlap_transfer
        self._sender = sender
        self._queue = queue
        self._optimistic = optimistic
        self._rooms: dict[int, PrefillRequest] = {}
        self._bootstrapping: dict[int, PrefillRequest] = {}
        self._draining_pages: dict[int, DrainingPages] = {}

    # ---- requests -------------------------------------------------------------------------------------

    def make_request(self, message: Generate, state: SamplingState) -> PrefillRequest:
        if message.room is None:
            raise RequestRefused(
                "a prefill worker needs a bootstrap_room; send requests through the router",
                status=400,
                param="bootstrap_room",
            )
        return PrefillRequest(message, state, room=message.room)

    def admit(self, request: Request) -> None:
        assert isinstance(request, PrefillRequest)
        try:
            self._sender.open(request.room, request.num_prompt)
        except DuplicateRoom as error:
            raise RequestRefused(str(error), status=400, param="bootstrap_room") from error
        self._rooms[request.room] = self._bootstrapping[request.room] = request

    def abort(self, request: Request, finish: Finish) -> None:
        assert isinstance(request, PrefillRequest)
        request.ending = finish
        self._sender.abort(request.room, finish.message, CLIENT_CLOSED_REQUEST)
        self._handle_events(self._sender.step())

    # ---- one turn -------------------------------------------------------------------------------------

    def advance(self) -> bool:
        self._handle_events(self._sender.step())
        plan = self._plan()
        for request in plan.admitted:
            assert isinstance(request, PrefillRequest)
            self._begin(request)
        if not plan.chunks or not self.may("compute"):
            return False
        tokens = iter(self.stepper.prefill(plan.chunks))
        self._queue.completed(plan.chunks)
        self._optimistic.completed(plan.chunks)
        for chunk in plan.chunks:
            self._send_final_pages(chunk.request)
            if chunk.request.prefilled:
                self._finish(chunk.request, next(tokens))
        return True

    def _plan(self) -> PrefillPlan:
        """One step: prompts with a destination, or, where none of those can or waits to run, others."""
        if (self._queue.num_waiting or self._bootstrapping) and not self.may("admit"):
            return self._queue.plan(max_admit=0)
        while self._queue.num_waiting and self._num_running >= self._max_running and self._give_way():
            continue
        plan = self._queue.plan(max_admit=self._num_places, reclaim=self._give_way)
        if plan.chunks or self._queue.num_waiting:
            return plan
        return self._optimistic.plan(self._bootstrapping.values(), max_admit=self._num_places)

    @property
    def _num_running(self) -> int:
        return len(self._rooms) - len(self._bootstrapping) - self._queue.num_waiting

    @property
    def _num_places(self) -> int:
        return max(0, self._max_running - self._num_running)

    def _begin(self, request: PrefillRequest) -> None:
        self._bootstrapping.pop(request.room, None)
        request.move(PrefillState.FORWARDING)
        if request.first_cached_tokens is None:
            request.first_cached_tokens = request.cached_tokens
            self.metrics.cached_tokens.inc(request.cached_tokens)
        request.cached_tokens = request.first_cached_tokens
        self._send_final_pages(request)

    def _finish(self, request: Request, token: SampledToken | None) -> None:
        assert isinstance(request, PrefillRequest)
        assert request.match is not None
        failure = request.state.failure
        if failure is not None:
            request.ending = failure
            # Ends with `Failed` in the next turn, like one that failed meanwhile for another reason.
            with contextlib.suppress(UnknownRoom):
                self._sender.abort(request.room, failure.message, failure.status)
            return
        request.first_token = token
        request.match = self.pool.cache(request.prompt_ids, request.pages.tolist(), request.match)
        request.move(PrefillState.TRANSFERRING)
        # A room that failed while its chunk was computed is unknown by now; its `Failed` comes next.
        with contextlib.suppress(UnknownRoom):
            self._sender.finish(request.room, request.aux())

    def _give_way(self) -> bool:
        """Put the newest prompt without a destination back; its whole pages go to the prefix cache. False
        when there is none."""
        request = self._optimistic.newest()
        if request is None:
            return False
        self._optimistic.release(request)
        self._sender.recall(request.room)
        assert request.match is not None
        computed = request.prompt_ids[: request.num_computed]
        whole = request.num_computed // self.pool.layout.page_size
        match = self.pool.cache(computed, request.pages[:whole].tolist(), request.match)
        self.pool.release(request.take_pages(), match)
        request.put_back()
        self._bootstrapping[request.room] = request
        return True

    def _send_final_pages(self, request: Request) -> None:
        assert isinstance(request, PrefillRequest)
        if not (self._overlap_transfer or request.prefilled):
            return
        pages = request.unsent_pages(self.pool.layout.page_size)
        if pages:
            with contextlib.suppress(UnknownRoom):
                self._sender.send(request.room, pages, request.num_sent_pages)
            request.num_sent_pages += len(pages)

    # ---- news from the transfer -----------------------------------------------------------------------

    def _handle_events(self, events: list[TransferEvent]) -> None:
        for event in events:
            match event:
                case DestinationReady(room=room):
                    self._start(self._rooms[room])
                case Sent(room=room):
                    self._complete(self._rooms.pop(room))
                case Failed():
                    self._fail(self._rooms.pop(event.room), event)
                case Drained(room=room):
                    left = self._draining_pages.pop(room)
                    self.pool.release(left.pages, left.match)

    def _start(self, request: PrefillRequest) -> None:
        """Its destination is known; pages that were computed ahead are on their way already."""
        self._optimistic.release(request)
        if request.phase is PrefillState.BOOTSTRAPPING:
            del self._bootstrapping[request.room]
            request.move(PrefillState.WAITING)
        if request.phase is not PrefillState.TRANSFERRING:
            self._queue.add(request)

    def _complete(self, request: PrefillRequest) -> None:
        request.move(PrefillState.DONE)
        self.pool.release(request.take_pages(), request.match)
        token = request.first_token
        finish = Finish(kind="length")
        if token is not None:
            request.accept(token.token_id)
            finish = request.state.finish_reason() or finish
        # No prompt logprobs: decode, which has them from the aux block, answers the client. The released
        # sglang-router puts both legs' lists behind each other, so exactly one leg may carry them.
        self.send_output(
            TokenOutput(
                rid=request.rid,
                token_ids=[] if token is None else [token.token_id],
                logprobs=None if token is None or token.logprob is None else [token.logprob],
                finish=finish,
                cached_tokens=request.cached_tokens,
            )
        )
        self.retire(request, finish, tell=False)

    def _fail(self, request: PrefillRequest, event: Failed) -> None:
        finish = request.ending or transfer_finish(event)
        self._bootstrapping.pop(request.room, None)
        self._optimistic.release(request)
        request.move(PrefillState.ABORTED if finish.kind == "abort" else PrefillState.FAILED)
        self._queue.remove(request)
        pages = request.take_pages()
        if event.drained:
            self.pool.release(pages, request.match)
        else:
            self._draining_pages[request.room] = DrainingPages(pages, request.match)
        self.retire(request, finish)

    # ---- loop hooks -----------------------------------------------------------------------------------

    def load(self) -> dict[str, int]:
        counts = self.pool.counts()
        return counts | {
            "num_running_reqs": len(self.requests),
            "num_waiting_reqs": self._queue.num_waiting,
            "num_used_tokens": counts["pages_held"] * self.pool.layout.page_size,
        }

    def weights_changed(self, fingerprint: Fingerprint) -> None:
        self._sender.adopt(fingerprint)

    def settled(self) -> bool:
        return not self._draining_pages

    def wait_seconds(self) -> float | None:
        if self._sender.busy:
            return POLL_SECONDS
        deadline = self._sender.next_deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return self._sender.pollables()
