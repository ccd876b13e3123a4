"""The decode worker's scheduler: reserve pages, receive the prompt's KV, produce tokens."""

from __future__ import annotations

import contextlib
import time
from collections import deque

import zmq

from diptych.decode.receiving import ReceivingLimits
from diptych.decode.request import IN_TRANSFER, DecodeRequest, DecodeState
from diptych.engine.kv_layout import Fingerprint
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
        max_receiving_fraction: float,
        retracted_timeout: float,
        default_bootstrap_port: int,
    ) -> None:
        """`max_receiving_fraction`: share of pages and of `max_running` that one prefill worker's undelivered
        rooms may take. `retracted_timeout`: seconds that a request may stay parked."""
        super().__init__(parts)
        self._receiver = receiver
        self._batch = batch
        self._max_running = max_running
        self._default_bootstrap_port = default_bootstrap_port
        self._rooms: dict[int, DecodeRequest] = {}
        self._decoding: set[int] = set()
        """Rooms whose transfer is over and whose request is not: they are active until it ends."""
        self._preallocating: deque[DecodeRequest] = deque()
        self._receiving = ReceivingLimits(
            max_pages=int(max_receiving_fraction * self.pool.allocator.total),
            max_requests=int(max_receiving_fraction * max_running),
        )
        self._retracted_timeout = retracted_timeout
        self._quarantine: dict[int, tuple[tuple[str, int], list[int]]] = {}
        """By room: the prefill worker that may still write, and where."""

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
            if request.room in self._decoding:
                raise DuplicateRoom(request.room)
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
        for request in self._batch.resume() if self._batch.parked and self.may("resume") else ():
            self._move(request, DecodeState.RUNNING)
        self._end_overdue()
        self._preallocate()
        retracted, too_big = self._batch.make_room()
        for request in retracted:
            self._move(request, DecodeState.RETRACTED)
            self.metrics.retractions.inc()
        for request in too_big:
            self._end(request, self.outgrown(request), DecodeState.FAILED)
        running = list(self._batch.running)
        if not running or not self.may("compute"):
            return False
        for request, token in zip(running, self.stepper.decode(running), strict=True):
            finish = self.accept(request, token)
            if finish is not None:
                self._end(request, finish, _end_state(finish), tell=False)
        return True

    def _preallocate(self) -> None:
        """Reserve pages for prompts whose handshake is done, oldest first; those of a prefill worker that has
        its share already are passed over. Parked requests come before."""
        if self._batch.parked:
            return
        for request in list(self._preallocating):
            receiving = self._receiving.num_requests
            if len(self._batch) + receiving >= self._max_running:
                return
            needed = self.pool.layout.pages_for(request.num_prompt)
            if not self._receiving.allows(request.prefill_worker, needed):
                continue
            if not self.pool.can_allocate(needed + self._batch.keep_free(joining=receiving)):
                return
            if not self.may("preallocate"):
                return
            self._preallocating.remove(request)
            pages = self.pool.allocate(needed)
            request.add_pages(pages)
            request.move(DecodeState.RECEIVING)
            self._receiving.started(request.prefill_worker, needed)
            # A room that failed meanwhile is unknown by now; its `Failed` comes with the next step.
            with contextlib.suppress(UnknownRoom):
                self._receiver.reserve(request.room, pages, request.num_prompt)

    def _end_overdue(self) -> None:
        """Whoever runs ends within its token limit, so only pages that nobody gives back keep a request
        parked for long."""
        limit = time.monotonic() - self._retracted_timeout
        for entry in [entry for entry in self._batch.parked if entry.since <= limit]:
            message = f"no pages became free for the parked request within {self._retracted_timeout:g} s"
            self._end(entry.request, Finish(kind="error", message=message, status=504), DecodeState.FAILED)

    def _end(self, request: Request, finish: Finish, phase: DecodeState, *, tell: bool = True) -> None:
        """End a request that is past its transfer."""
        assert isinstance(request, DecodeRequest)
        self._decoding.discard(request.room)
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
                    self._join(self._rooms.pop(event.room), event)
                case Failed():
                    self._fail(self._rooms.pop(event.room), event)
                case Drained(room=room):
                    worker, pages = self._quarantine.pop(room)
                    self.pool.allocator.end_quarantine(pages)
                    self._receiving.safe(worker, len(pages))

    def _join(self, request: DecodeRequest, event: Received) -> None:
        """The prompt's KV is here: take over the first token and join the batch without a forward."""
        self._decoding.add(request.room)
        request.move(DecodeState.READY)
        self._receiving.ended(request.prefill_worker)
        self._receiving.safe(request.prefill_worker, len(request.pages))
        aux = event.aux
        request.num_computed = request.num_prompt
        request.cached_tokens = aux.cached_tokens
        if aux.prompt_logprobs is not None:
            request.prompt_logprobs = aux.prompt_logprobs
        if (aux.first_token is None) != (request.params.max_new_tokens == 0):
            # Prefill got another request under this room.
            sent = "no first token" if aux.first_token is None else "a first token"
            message = f"prefill sent {sent} for max_tokens {request.params.max_new_tokens}"
            self._end(request, Finish(kind="error", message=message, status=502), DecodeState.FAILED)
            return
        if aux.first_token is not None and not request.state.allows(aux.first_token):
            message = f"prefill sent token {aux.first_token}, which the request's grammar doesn't allow"
            self._end(request, Finish(kind="error", message=message, status=502), DecodeState.FAILED)
            return
        first = None if aux.first_token is None else SampledToken(aux.first_token, aux.first_logprob)
        finish = self.accept(request, first)
        if finish is not None:
            self._end(request, finish, _end_state(finish), tell=False)
            return
        request.move(DecodeState.RUNNING)
        self._batch.add(request)

    def _fail(self, request: DecodeRequest, event: Failed) -> None:
        finish = request.ending or transfer_finish(event)
        if request.phase is DecodeState.RECEIVING:
            self._receiving.ended(request.prefill_worker)
        elif request.phase is DecodeState.PREALLOCATING:
            self._preallocating.remove(request)
        request.move(DecodeState.ABORTED if finish.kind == "abort" else DecodeState.FAILED)
        pages = request.take_pages()
        if event.drained:
            self.pool.release(pages, None)
            self._receiving.safe(request.prefill_worker, len(pages))
        else:
            self.pool.allocator.quarantine(pages)
            self._quarantine[request.room] = (request.prefill_worker, pages)
        self.retire(request, finish)

    # ---- loop hooks -----------------------------------------------------------------------------------

    def load(self) -> dict[str, int]:
        counts = self.pool.counts()
        return counts | {
            "num_running_reqs": len(self._batch.running),
            "num_waiting_reqs": len(self.requests) - len(self._batch.running),
            "num_used_tokens": counts["pages_held"] * self.pool.layout.page_size,
        }

    def weights_changed(self, fingerprint: Fingerprint) -> None:
        self._receiver.adopt(fingerprint)

    def settled(self) -> bool:
        return not self._quarantine

    def wait_seconds(self) -> float | None:
        if self._receiver.busy:
            return POLL_SECONDS
        deadlines = [entry.since + self._retracted_timeout for entry in self._batch.parked]
        transfer = self._receiver.next_deadline()
        if transfer is not None:
            deadlines.append(transfer)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return self._receiver.pollables()


def _end_state(finish: Finish) -> DecodeState:
    return DecodeState.FAILED if finish.kind == "error" else DecodeState.DONE
