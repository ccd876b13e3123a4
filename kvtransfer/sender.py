"""Prefill's side of page transfer: one object per scheduler process."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import zmq

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer import wire
from diptych.kvtransfer.backends.interface import TransferBackend, WriteState
from diptych.kvtransfer.bootstrap.route import RankRoute
from diptych.kvtransfer.control import ControlEndpoint, Inbound, LinkDown
from diptych.kvtransfer.errors import DuplicateRoom, TransferError, UnknownRoom
from diptych.kvtransfer.events import DestinationReady, Drained, Failed, Sent, TransferEvent
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.probe import DeathProbe
from diptych.kvtransfer.room_memory import EarlyReservation, RoomMemory, Verdict
from diptych.kvtransfer.sender_peers import DecodePeers
from diptych.kvtransfer.sender_session import FAILING, SenderSession
from diptych.kvtransfer.settings import TransferSettings
from diptych.kvtransfer.states import SenderState
from diptych.kvtransfer.stats import TransferStats
from diptych.kvtransfer.wakeup import Wakeup

logger = logging.getLogger(__name__)


class PrefillSender:
    """Pushes finished pages into decode's reserved pages. All calls from one thread; none blocks."""

    def __init__(
        self,
        *,
        backend: TransferBackend,
        fingerprint: Fingerprint,
        identity: Identity,
        host: str,
        port: int = 0,
        settings: TransferSettings,
        stats: TransferStats,
    ) -> None:
        """Bind the control socket on `host` (also what is advertised; port 0 picks a free one).
        The sender owns the backend from now on. Raises `zmq.ZMQError` when it can't bind."""
        self._backend = backend
        self._fingerprint = fingerprint
        self._identity = identity
        self._settings = settings
        self._stats = stats
        self._control = ControlEndpoint(identity, host, port, settings.heartbeat_interval, stats)
        self._peers = DecodePeers(self._control, backend, fingerprint, stats)
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="peer-probe")
        self._wakeup = Wakeup()
        self._probe = DeathProbe(self._pool, self._wakeup)
        self._probe_at: float | None = None
        self._sessions: dict[int, SenderSession] = {}
        self._memory = RoomMemory()
        self._events: list[TransferEvent] = []
        self._closed = False

    @property
    def control_address(self) -> str:
        """`tcp://host:port`."""
        return self._control.address

    def route(self, *, worker_id: str, rank: int = 0, world_size: int = 1) -> RankRoute:
        """This rank's registration at the bootstrap service. `worker_id`: one per worker start."""
        return RankRoute(
            version=wire.PROTOCOL_VERSION,
            worker_id=worker_id,
            rank=rank,
            world_size=world_size,
            identity=self._identity,
            control_address=self.control_address,
            fingerprint=self._fingerprint,
            backend=self._backend.name,
        )

    @property
    def busy(self) -> bool:
        """Call `step()` again soon, without waiting for a socket: events are waiting, or writes are in
        flight on a backend that can't wake a poller."""
        if self._events:
            return True
        return self._backend.fileno() is None and any(s.writes for s in self._sessions.values())

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """Sockets and file descriptors whose readability means `step()` has work. Ask before each wait."""
        descriptor = self._backend.fileno()
        extra = [] if descriptor is None else [descriptor]
        return [*self._control.pollables(), self._wakeup.fileno(), *extra]

    def next_deadline(self) -> float | None:
        """`time.monotonic()` value at which `step()` must run at the latest; None when nothing is waiting."""
        if self._events:
            return 0.0
        candidates = [s.deadline for s in self._sessions.values()]
        candidates += [self._memory.next_deadline(), self._probe_at]
        return min((c for c in candidates if c is not None), default=None)

    def state(self, room: int) -> SenderState | None:
        """None when the room has no session."""
        session = self._sessions.get(room)
        return None if session is None else session.state

    def step(self) -> list[TransferEvent]:
        """Read control messages, poll writes, check deadlines. Events: `DestinationReady`, `Sent`,
        `Failed`, `Drained`."""
        self._wakeup.clear()
        self._backend.clear_wakeup()
        for news in self._control.step():
            if isinstance(news, LinkDown):
                self._lose_peer(news.target, f"decode worker: {news.reason}", "peer_lost")
            else:
                self._dispatch(news)
        for session in list(self._sessions.values()):
            self._poll(session)
        self._check_deadlines(time.monotonic())
        self._probe_draining(time.monotonic())
        self._peers.forget_lost({s.peer for s in self._sessions.values() if s.peer and s.writes})
        events, self._events = self._events, []
        return events

    # ---- the scheduler's calls ----------------------------------------------------------------------

    def open(self, room: int) -> None:
        """The request of this room has arrived. Raises `DuplicateRoom` while the room is active or its
        pages are draining. A destination or a refusal that came earlier shows in the next `step()`."""
        if room in self._sessions:
            raise DuplicateRoom(room)
        session = SenderSession(room, time.monotonic() + self._settings.bootstrap_timeout)
        self._sessions[room] = session
        self._memory.failed_here.pop(room, None)
        refusal = self._memory.refused.pop(room, None)
        early = self._memory.early.pop(room, None)
        if refusal is not None:
            self._fail(session, refusal.reason, refusal.status, "peer", tell=False)
        elif early is not None:
            self._bind(session, early.source, early.reserve)

    def send(self, room: int, src_pages: Sequence[int], first_page_index: int) -> None:
        """Push local pages as the request's pages `first_page_index ..`; those decode already has are
        skipped. Legal before the destination is known (the writes then wait for it). Raises `UnknownRoom`
        when the room has failed or ended (its `Failed` event may still be on its way), and `TransferError`
        when a page lies outside what decode reserved or outside the slab."""
        session = self._active(room)
        if session.state is SenderState.FINISHING or session.aux is not None:
            raise TransferError(f"room {room} is already finished")
        if session.reservation is None:
            session.queued.append((list(src_pages), first_page_index))
            return
        self._post(session, src_pages, first_page_index)

    def finish(self, room: int, aux: wire.AuxBlock) -> None:
        """The last page was sent. Once every write is final decode gets `aux`, and `Sent` follows.
        Raises `UnknownRoom` as `send` does."""
        session = self._active(room)
        if aux.room != room:
            raise TransferError(f"the aux block is stamped with room {aux.room}, not {room}")
        session.aux = aux
        if session.reservation is not None:
            session.move(SenderState.FINISHING)
            self._poll(session)

    def abort(self, room: int, reason: str, status: int = 499) -> None:
        """Fail the room here and at decode. `Failed` (and `Drained`) follow from `step()`.
        No effect when the room isn't active."""
        session = self._sessions.get(room)
        if session is not None and session.state not in FAILING:
            self._fail(session, reason, status, "abort")

    def close(self) -> None:
        """Tell peers of active rooms, close sockets and the backend. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for room in list(self._sessions):
            self.abort(room, "the prefill worker is shutting down", 503)
        self._control.close()
        self._backend.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._wakeup.close()

    def _active(self, room: int) -> SenderSession:
        session = self._sessions.get(room)
        if session is None or session.state in FAILING:
            raise UnknownRoom(room)
        return session

    # ---- messages -----------------------------------------------------------------------------------

    def _dispatch(self, inbound: Inbound) -> None:
        body = inbound.body
        if isinstance(body, wire.Hello):
            self._peers.hello(inbound, body)
        elif isinstance(body, wire.Reserve):
            self._reserve(inbound, body)
        elif isinstance(body, wire.Abort):
            self._aborted(inbound, body)
        elif isinstance(body, wire.Refused):
            self._lose_peer(inbound.source, f"decode worker: {body.reason}", "peer_lost")
        else:
            self._stats.control_dropped("unexpected")

    def _reserve(self, inbound: Inbound, reserve: wire.Reserve) -> None:
        source = inbound.source
        peer = self._peers.usable(source)
        if peer is None:
            self._peers.refuse_stranger(inbound)
            return
        if self._memory.ended(source, reserve.lease) is not None:
            self._drop_lease(source, reserve, "the room was given up before its pages were reserved", 499)
            return
        problem = _reservation_problem(reserve, peer.num_pages)
        session = self._sessions.get(reserve.room)
        if problem is not None:
            self._stats.control_dropped("refused")
            self._drop_lease(source, reserve, f"reservation refused: {problem}", 400)
        elif session is not None and session.state is SenderState.AWAITING_DESTINATION:
            self._bind(session, source, reserve)
        elif session is not None or reserve.room in self._memory.early:
            self._drop_lease(source, reserve, f"bootstrap_room {reserve.room} already has a destination", 400)
        elif (verdict := self._memory.failed_here.pop(reserve.room, None)) is not None:
            self._drop_lease(source, reserve, verdict.reason, verdict.status)
        else:
            deadline = time.monotonic() + self._settings.bootstrap_timeout
            self._memory.early[reserve.room] = EarlyReservation(source, reserve, deadline)

    def _drop_lease(self, source: str, reserve: wire.Reserve, reason: str, status: int) -> None:
        """Refuse a reservation for good: no page of it was written or ever will be."""
        abort = wire.Abort(room=reserve.room, lease=reserve.lease, reason=reason, status=status)
        self._peers.tell(source, abort)
        self._memory.end_lease(source, reserve.lease, True)
        self._peers.tell(source, wire.RoomDrained(room=reserve.room, lease=reserve.lease, clean=True))

    def _bind(self, session: SenderSession, source: str, reserve: wire.Reserve) -> None:
        session.peer = source
        session.reservation = reserve
        session.deadline = None
        session.move(SenderState.READY)
        self._events.append(
            DestinationReady(
                session.room, len(reserve.pages), reserve.num_prompt_tokens, reserve.first_page_index
            )
        )
        queued, session.queued = session.queued, []
        try:
            for src_pages, first_page_index in queued:
                self._post(session, src_pages, first_page_index)
        except TransferError as error:
            self._fail(session, str(error), 500, "protocol")
            return
        if session.aux is not None:
            session.move(SenderState.FINISHING)

    def _aborted(self, inbound: Inbound, abort: wire.Abort) -> None:
        """Decode gave the room up, or asks again whether it has drained."""
        source, room = inbound.source, abort.room
        session = self._sessions.get(room)
        if session is not None and session.peer == source and session.lease == abort.lease:
            if session.state not in FAILING:
                self._fail(session, abort.reason, abort.status, "peer", tell=False)
            return
        clean = self._memory.ended(source, abort.lease)
        if clean is None:
            clean = True
            self._memory.end_lease(source, abort.lease, clean)
            early = self._memory.early.get(room)
            if session is not None and session.state is SenderState.AWAITING_DESTINATION:
                self._fail(session, abort.reason, abort.status, "peer", tell=False, remember=False)
            elif session is None and (early is None or early.source == source):
                self._memory.early.pop(room, None)
                self._remember_refusal(room, abort.reason, abort.status)
        self._control.reply(inbound, wire.RoomDrained(room=room, lease=abort.lease, clean=clean))

    def _remember_refusal(self, room: int, reason: str, status: int) -> None:
        if self._memory.failed_here.pop(room, None) is None:
            deadline = time.monotonic() + self._settings.bootstrap_timeout
            self._memory.refused[room] = Verdict(reason, status, deadline)

    def _lose_peer(self, instance_id: str, reason: str, kind: str) -> None:
        self._peers.lose(instance_id, reason)
        for session in list(self._sessions.values()):
            if session.peer == instance_id and session.state not in FAILING:
                self._fail(session, reason, 502, kind)
        for entry in [e for e in self._memory.early.values() if e.source == instance_id]:
            del self._memory.early[entry.reserve.room]
            self._remember_refusal(entry.reserve.room, reason, 502)

    # ---- writes and ends ----------------------------------------------------------------------------

    def _post(self, session: SenderSession, src_pages: Sequence[int], first_page_index: int) -> None:
        assert session.peer is not None
        src, dst = session.destinations(src_pages, first_page_index)
        if not src:
            return
        started = time.monotonic()
        write = self._backend.post_write(session.peer, src, dst)
        session.written.update(dst)
        self._stats.posted(write, time.monotonic() - started)
        session.writes.append(write)
        session.deadline = started + self._settings.transfer_timeout
        if session.state is SenderState.READY:
            session.move(SenderState.SENDING)

    def _poll(self, session: SenderSession) -> None:
        for write in session.writes:
            self._backend.poll(write)
        error = ""
        for write in session.settled():
            self._stats.write_seconds.observe(write.finished_at - write.posted_at)
            if write.state is WriteState.FAILED:
                session.clean = False
                error = write.error
        if error and session.state not in FAILING:
            # The library's connection can't be trusted any more, for any room.
            assert session.peer is not None
            self._lose_peer(session.peer, f"page transfer to the decode worker failed: {error}", "write")
        if session.writes:
            return
        if session.state is SenderState.DRAINING:
            self._end_drained(session)
            self._events.append(Drained(session.room))
        elif session.state is SenderState.FINISHING:
            self._complete(session)
        elif session.state is SenderState.SENDING:
            session.deadline = None

    def _complete(self, session: SenderSession) -> None:
        assert session.peer is not None
        assert session.aux is not None
        complete = wire.Complete(
            room=session.room, lease=session.lease, num_pages=len(session.written), aux=session.aux
        )
        try:
            self._peers.tell(session.peer, complete)
        except wire.WireError as error:
            self._fail(session, str(error), 500, "protocol")
            return
        session.move(SenderState.DONE)
        self._memory.end_lease(session.peer, session.lease, True)
        del self._sessions[session.room]
        self._stats.rooms_done.inc()
        self._events.append(Sent(session.room))

    def _fail(
        self,
        session: SenderSession,
        reason: str,
        status: int,
        kind: str,
        *,
        tell: bool = True,
        remember: bool = True,
    ) -> None:
        session.move(SenderState.FAILED)
        session.deadline = None
        session.queued.clear()
        self._stats.failed(kind)
        if session.peer is None and remember and tell:
            deadline = time.monotonic() + self._settings.bootstrap_timeout
            self._memory.failed_here[session.room] = Verdict(reason, status, deadline)
        elif session.peer is not None and tell:
            abort = wire.Abort(room=session.room, lease=session.lease, reason=reason, status=status)
            self._peers.tell(session.peer, abort)
        drained = not session.writes
        self._events.append(Failed(session.room, reason, status, drained))
        if drained:
            self._end_drained(session)
        else:
            session.move(SenderState.DRAINING)
            self._probe_at = self._probe_at or time.monotonic() + 2 * self._settings.heartbeat_interval

    def _end_drained(self, session: SenderSession) -> None:
        session.move(SenderState.DRAINED)
        del self._sessions[session.room]
        if session.peer is not None:
            self._memory.end_lease(session.peer, session.lease, session.clean)
            drained = wire.RoomDrained(room=session.room, lease=session.lease, clean=session.clean)
            self._peers.tell(session.peer, drained)

    def _check_deadlines(self, now: float) -> None:
        for session in list(self._sessions.values()):
            if session.deadline is None or session.deadline > now:
                continue
            state = session.state.value
            self._stats.deadline_hit(state)
            if session.state is SenderState.AWAITING_DESTINATION:
                limit = self._settings.bootstrap_timeout
                reason = f"no decode worker reserved pages within {limit:g} s (state: {state})"
            else:
                limit = self._settings.transfer_timeout
                reason = f"pages were still in flight after {limit:g} s (state: {state})"
            self._fail(session, reason, 504, "deadline")
        for entry in self._memory.expire(now):
            self._stats.deadline_hit("early reservation")
            limit = self._settings.bootstrap_timeout
            reason = f"the prefill worker got no request for this room within {limit:g} s of its reservation"
            self._drop_lease(entry.source, entry.reserve, reason, 504)
            self._remember_refusal(entry.reserve.room, reason, 504)

    def _probe_draining(self, now: float) -> None:
        """Writes to a process that is no more will never become final by themselves on every transport."""
        for instance_id, proof in self._probe.take():
            logger.info("decode worker %s is gone: %s", instance_id, proof)
            self._peers.abandon(instance_id)
        if self._probe_at is None:
            return
        draining = {s.peer for s in self._sessions.values() if s.state is SenderState.DRAINING}
        if not draining:
            self._probe_at = None
        elif now < self._probe_at:
            return
        else:
            self._probe_at = now + 2 * self._settings.heartbeat_interval
        for target in draining:
            peer = self._peers.get(target) if target else None
            if peer is not None:
                self._probe.submit(peer.peer)


def _reservation_problem(reserve: wire.Reserve, num_pages: int) -> str | None:
    """Why a reservation can't be honoured; nothing is written for it then."""
    pages = reserve.pages
    if reserve.room < 0 or reserve.first_page_index < 0 or reserve.num_prompt_tokens < 0:
        return "negative room, page index or token count"
    if pages and (min(pages) < 0 or max(pages) >= num_pages):
        return f"page index outside 0..{num_pages - 1}"
    if len(set(pages)) != len(pages):
        return "the same page twice"
    return None
