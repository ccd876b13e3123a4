"""The decode worker's scheduler: reserve pages, receive the prompt's KV, produce tokens."""

from __future__ import annotations

import contextlib
import time
from collections import deque

import zmq

from diptych.decode.request import IN_TRANSFER, DecodeRequest, DecodeState
from diptych.engine.request import Request
from diptych.engine.running_batch import RunningBatch
from diptych.engine.sampling import SampledToken, SamplingState
from diptych.engine.scheduler import RequestRefused, Scheduler, SchedulerParts
from diptych.engine.wire import Finish, Generate
from diptych.kvtransfer.errors import DuplicateRoom, UnknownRoom
from diptych.kvtransfer.events import Drained, Failed, HandshakeDone, Received, TransferEvent
from diptych.kvtransfer.outcome import CLIENT_CLOSED_REQUEST, transfer_finish
from diptych.kvtransfer.receiver import DecodeReceiver

# While the transfer library needs our help to receive, it is given a turn this often.
POLL_SECONDS = 0.001


class DecodeScheduler(Scheduler):
    def __init__(
        self,
        parts: SchedulerParts,
        receiver: DecodeReceiver,
        batch: RunningBatch,
        *,
        max_running: int,
        default_bootstrap_port: int,
    ) -> None:
        super().__init__(parts)
        self._receiver = receiver
        self._batch = batch
        self._max_running = max_running
        self._default_bootstrap_port = default_bootstrap_port
        self._rooms: dict[int, DecodeRequest] = {}
        self._preallocating: deque[DecodeRequest] = deque()
        self._num_receiving = 0
        self._quarantine: dict[int, list[int]] = {}

    # ---- requests -------------------------------------------------------------------------------------

    def make_request(self, message: Generate, state: SamplingState) -> DecodeRequest:
        if message.room is None or message.bootstrap_host is None:
            raise RequestRefused(
                "a decode worker needs bootstrap_host and bootstrap_room; send requests through the router",
                status=400,
                param="bootstrap_room" if message.room is None else "bootstrap_host",
            )
        return DecodeRequest(
            message,
            state,
            room=message.room,
            host=message.bootstrap_host,
            port=message.bootstrap_port or self._default_bootstrap_port,
        )

    def admit(self, request: Request) -> None:
        assert isinstance(request, DecodeRequest)
        try:
            self._receiver.open(request.room, request.bootstrap_host, request.bootstrap_port)
        except DuplicateRoom as error:
            raise RequestRefused(str(error), status=400, param="bootstrap_room") from error
        self._rooms[request.room] = request

    def abort(self, request: Request, finish: Finish) -> None:
        assert isinstance(request, DecodeRequest)
        if request.phase in IN_TRANSFER:
            request.ending = finish
            self._receiver.abort(request.room, finish.message, CLIENT_CLOSED_REQUEST)
            self._handle_events(self._receiver.step())
        # Still there when its pages had arrived before the abort did.
        if request.rid in self.requests and request.phase not in IN_TRANSFER:
            self._end(request, finish, DecodeState.ABORTED)

    # ---- one turn -------------------------------------------------------------------------------------

    def advance(self) -> bool:
        self._handle_events(self._receiver.step())
        for request in self._batch.resume():
            self._move(request, DecodeState.RUNNING)
        self._preallocate()
        retracted, too_big = self._batch.make_room()
        for request in retracted:
            self._move(request, DecodeState.RETRACTED)
            self.metrics.retractions.inc()
        for request in too_big:
            self._end(request, self.outgrown(request), DecodeState.FAILED)
        running = list(self._batch.running)
        if not running:
            return False
        for request, token in zip(running, self.stepper.decode(running), strict=True):
            finish = self.accept(request, token)
            if finish is not None:
                self._end(request, finish, DecodeState.DONE, tell=False)
        return True

    def _preallocate(self) -> None:
        """Reserve pages for prompts whose handshake is done, oldest first. Parked requests come before."""
        while self._preallocating and not self._batch.parked:
            if len(self._batch) + self._num_receiving >= self._max_running:
                return
            request = self._preallocating[0]
            needed = self.pool.layout.pages_for(request.num_prompt)
            if not self.pool.can_allocate(needed + self._batch.keep_free(joining=self._num_receiving)):
                return
            self._preallocating.popleft()
            pages = self.pool.allocate(needed)
            request.add_pages(pages)
            request.move(DecodeState.RECEIVING)
            self._num_receiving += 1
            # A room that failed meanwhile is unknown by now; its `Failed` comes with the next step.
            with contextlib.suppress(UnknownRoom):
                self._receiver.reserve(request.room, pages, request.num_prompt)

    def _end(self, request: Request, finish: Finish, phase: DecodeState, *, tell: bool = True) -> None:
        """End a request that is past its transfer."""
        self._batch.remove(request)
        self._move(request, phase)
        self.pool.release(request.take_pages(), request.match)
        self.retire(request, finish, tell=tell)

    def _move(self, request: Request, phase: DecodeState) -> None:
        assert isinstance(request, DecodeRequest)
        request.move(phase)

    # ---- news from the transfer -----------------------------------------------------------------------

    def _handle_events(self, events: list[TransferEvent]) -> None:
        for event in events:
            match event:
                case HandshakeDone(room=room):
                    request = self._rooms[room]
                    request.move(DecodeState.PREALLOCATING)
                    self._preallocating.append(request)
                case Received():
                    self._num_receiving -= 1
                    self._join(self._rooms.pop(event.room), event)
                case Failed():
                    self._fail(self._rooms.pop(event.room), event)
                case Drained(room=room):
                    self.pool.allocator.end_quarantine(self._quarantine.pop(room))

    def _join(self, request: DecodeRequest, event: Received) -> None:
        """The prompt's KV is here: take over the first token and join the batch without a forward."""
        request.move(DecodeState.READY)
        aux = event.aux
        request.num_computed = request.num_prompt
        request.cached_tokens = aux.cached_tokens
        if aux.prompt_logprobs is not None:
            request.prompt_logprobs = aux.prompt_logprobs
        first = None if aux.first_token is None else SampledToken(aux.first_token, aux.first_logprob)
        finish = self.accept(request, first)
        if finish is not None:
            self._end(request, finish, DecodeState.DONE, tell=False)
            return
        request.move(DecodeState.RUNNING)
        self._batch.add(request)

    def _fail(self, request: DecodeRequest, event: Failed) -> None:
        finish = request.ending or transfer_finish(event)
        if request.phase is DecodeState.RECEIVING:
            self._num_receiving -= 1
        elif request.phase is DecodeState.PREALLOCATING:
            self._preallocating.remove(request)
        request.move(DecodeState.ABORTED if finish.kind == "abort" else DecodeState.FAILED)
        pages = request.take_pages()
        if event.drained:
            self.pool.release(pages, None)
        else:
            self.pool.allocator.quarantine(pages)
            self._quarantine[request.room] = pages
        self.retire(request, finish)

    # ---- loop hooks -----------------------------------------------------------------------------------

    def load(self) -> dict[str, int]:
        counts = self.pool.counts()
        return counts | {
            "num_running_reqs": len(self._batch.running),
            "num_waiting_reqs": len(self.requests) - len(self._batch.running),
            "num_used_tokens": counts["pages_held"] * self.pool.layout.page_size,
        }

    def settled(self) -> bool:
        return not self._quarantine

    def wait_seconds(self) -> float | None:
        if self._receiver.busy:
            return POLL_SECONDS
        deadline = self._receiver.next_deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return self._receiver.pollables()
