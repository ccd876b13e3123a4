"""The rooms of a prefill worker: their writes, their failures, and how they end."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from diptych.kvtransfer import wire
from diptych.kvtransfer.backends.interface import WriteState
from diptych.kvtransfer.checksum import checksum_of_aux
from diptych.kvtransfer.errors import TransferError, UnknownRoom
from diptych.kvtransfer.events import DestinationReady, Drained, Failed, Sent, TransferEvent
from diptych.kvtransfer.parts import TransferParts
from diptych.kvtransfer.room_memory import RoomMemory, Verdict
from diptych.kvtransfer.sender_peers import DecodePeers
from diptych.kvtransfer.sender_session import FAILING, TERMINAL, SenderSession
from diptych.kvtransfer.states import SenderState
from diptych.kvtransfer.stats import FailureKind

logger = logging.getLogger(__name__)


class SenderRooms:
    """Sessions by room, and every move they make. The owner passes on what peers and the scheduler say."""

    def __init__(self, parts: TransferParts, peers: DecodePeers) -> None:
        self._backend = parts.backend
        self._checksums = parts.checksums
        self._page_size = parts.fingerprint.page_size
        self._peers = peers
        self._probe = parts.probe
        self._probe_at: float | None = None
        self._settings = parts.settings
        self._stats = parts.stats
        self._clock = parts.clock
        self.sessions: dict[int, SenderSession] = {}
        self.memory = RoomMemory()
        self.events: list[TransferEvent] = []
        self._stats.watch(
            [state for state in SenderState if state not in TERMINAL],
            lambda state: sum(s.state is state for s in self.sessions.values()),
            self._draining_pages,
        )

    def _draining_pages(self) -> int:
        draining = (s for s in self.sessions.values() if s.state is SenderState.DRAINING)
        return sum(write.num_pages for session in draining for write in session.writes)

    def next_deadline(self) -> float | None:
        candidates = [s.deadline for s in self.sessions.values()]
        candidates += [self.memory.next_deadline(), self._probe_at]
        return min((c for c in candidates if c is not None), default=None)

    def take_events(self) -> list[TransferEvent]:
        events, self.events = self.events, []
        return events

    def is_taken(self, room: int) -> bool:
        """By a session, or by one whose last event nobody has seen: it would be taken for its successor's."""
        return room in self.sessions or any(event.room == room for event in self.events)

    def active(self, room: int) -> SenderSession:
        session = self.sessions.get(room)
        if session is None or session.state in FAILING:
            raise UnknownRoom(room)
        return session

    def drop_lease(self, source: str, reserve: wire.Reserve, reason: str, status: int) -> None:
        """Refuse a reservation for good: no page of it was written or ever will be."""
        abort = wire.Abort(room=reserve.room, lease=reserve.lease, reason=reason, status=status)
        self._peers.tell(source, abort)
        self.memory.end_lease(source, reserve.lease, True)
        self._peers.tell(source, wire.RoomDrained(room=reserve.room, lease=reserve.lease, clean=True))

    def bind(self, session: SenderSession, source: str, reserve: wire.Reserve) -> None:
        session.peer = source
        session.reservation = reserve
        problem = session.misfit(reserve, self._page_size)
        if problem is not None:
            self.fail(session, problem, 400, "protocol")
            return
        # Decode's own time-out comes first, and its word by then: both legs give the same reason.
        slack = 2 * self._settings.heartbeat_interval
        session.due = session.deadline = self._clock() + self._settings.receive_timeout + slack
        session.move(SenderState.READY)
        self.events.append(
            DestinationReady(
                session.room, len(reserve.pages), reserve.num_prompt_tokens, reserve.first_page_index
            )
        )
        queued, session.queued = session.queued, []
        try:
            for src_pages, first_page_index in queued:
                self.post(session, src_pages, first_page_index)
        except TransferError as error:
            self.fail(session, str(error), 500, "protocol")
            return
        if session.aux is not None:
            session.move(SenderState.FINISHING)

    def remember_refusal(self, room: int, reason: str, status: int) -> None:
        if self.memory.failed_here.pop(room, None) is None:
            deadline = self._clock() + self._settings.bootstrap_timeout
            self.memory.refused[room] = Verdict(reason, status, deadline)

    def lose_peer(self, instance_id: str, reason: str, kind: FailureKind) -> None:
        self._peers.lose(instance_id, reason)
        for session in list(self.sessions.values()):
            if session.peer == instance_id and session.state not in FAILING:
                self.fail(session, reason, 502, kind)
        for entry in [e for e in self.memory.early.values() if e.source == instance_id]:
            del self.memory.early[entry.reserve.room]
            self.remember_refusal(entry.reserve.room, reason, 502)

    def post(self, session: SenderSession, src_pages: Sequence[int], first_page_index: int) -> None:
        assert session.peer is not None
        src, dst = session.destinations(src_pages, first_page_index)
        if not src:
            return
        if session.wants_checksums:
            with self._stats.checksum_seconds.time():
                session.checksums.update(zip(dst, self._checksums.of(src), strict=True))
        started = self._clock()
        write = self._backend.post_write(session.peer, src, dst)
        session.written.update(dst)
        self._stats.posted(write, self._clock() - started)
        session.writes.append(write)
        session.deadline = min(session.due, started + self._settings.transfer_timeout)
        if session.state is SenderState.READY:
            session.move(SenderState.SENDING)

    def to_poll(self) -> list[SenderSession]:
        """Those for which `poll` may find news: not the many that wait for a destination or for compute."""
        return [s for s in self.sessions.values() if s.writes or s.state is SenderState.FINISHING]

    def poll(self, session: SenderSession) -> None:
        for write in session.writes:
            self._backend.poll(write)
        error = ""
        for write in session.settled():
            self._stats.written(write)
            if write.state is WriteState.FAILED:
                session.clean = False
                error = write.error
        if error and session.state not in FAILING:
            # The library's connection can't be trusted any more, for any room.
            assert session.peer is not None
            self.lose_peer(session.peer, f"page transfer to the decode worker failed: {error}", "write")
        if session.writes:
            return
        if session.state is SenderState.DRAINING:
            self._end_drained(session)
            self.events.append(Drained(session.room))
        elif session.state is SenderState.FINISHING:
            self._complete(session)
        elif session.state is SenderState.SENDING:
            session.deadline = session.due

    def _complete(self, session: SenderSession) -> None:
        assert session.peer is not None
        assert session.aux is not None
        complete = wire.Complete(
            room=session.room,
            lease=session.lease,
            num_pages=len(session.written),
            aux=session.aux,
            checksums=self._checksums_of(session, session.aux),
        )
        try:
            self._peers.tell(session.peer, complete)
        except wire.WireError as error:
            self.fail(session, str(error), 500, "protocol")
            return
        self._stats.handover_seconds.observe(self._clock() - session.finished_at)
        if session.wants_checksums:
            session.move(SenderState.CONFIRMING)
            session.deadline = self._clock() + self._settings.transfer_timeout
        else:
            self._end_done(session)

    def _checksums_of(self, session: SenderSession, aux: wire.AuxBlock) -> wire.Checksums | None:
        if session.reservation is None or not session.reservation.checksum:
            return None
        known = session.checksums
        pages = [known[page] for page in session.reservation.pages if page in known]
        return wire.Checksums(pages=pages, aux=checksum_of_aux(aux))

    def verified(self, source: str, verified: wire.Verified) -> None:
        session = self.sessions.get(verified.room)
        if (
            session is None
            or session.state is not SenderState.CONFIRMING
            or (session.peer, session.lease) != (source, verified.lease)
        ):
            self._stats.control_dropped("foreign")
            return
        self._end_done(session)

    def _end_done(self, session: SenderSession) -> None:
        assert session.peer is not None
        session.move(SenderState.DONE)
        self.memory.end_lease(session.peer, session.lease, True)
        del self.sessions[session.room]
        self._stats.rooms_done.inc()
        self.events.append(Sent(session.room))

    def fail(
        self,
        session: SenderSession,
        reason: str,
        status: int,
        kind: FailureKind,
        *,
        tell: bool = True,
        remember: bool = True,
    ) -> None:
        session.move(SenderState.FAILED)
        session.deadline = None
        session.queued.clear()
        self._stats.failed(kind)
        if session.peer is None and remember and tell:
            deadline = self._clock() + self._settings.bootstrap_timeout
            self.memory.failed_here[session.room] = Verdict(reason, status, deadline)
        elif session.peer is not None and tell:
            abort = wire.Abort(room=session.room, lease=session.lease, reason=reason, status=status)
            self._peers.tell(session.peer, abort)
        drained = not session.writes
        self.events.append(Failed(session.room, reason, status, drained))
        if drained:
            self._end_drained(session)
        else:
            session.move(SenderState.DRAINING)
            self._probe_at = self._probe_at or self._clock() + 2 * self._settings.heartbeat_interval

    def _end_drained(self, session: SenderSession) -> None:
        session.move(SenderState.DRAINED)
        del self.sessions[session.room]
        if session.peer is not None:
            self.memory.end_lease(session.peer, session.lease, session.clean)
            drained = wire.RoomDrained(room=session.room, lease=session.lease, clean=session.clean)
            self._peers.tell(session.peer, drained)

    def check_deadlines(self, now: float) -> None:
        for session in list(self.sessions.values()):
            if session.deadline is None or session.deadline > now:
                continue
            state = session.state.value
            self._stats.deadline_hit(state)
            if session.state is SenderState.AWAITING_DESTINATION:
                limit = self._settings.bootstrap_timeout
                reason = f"no decode worker reserved pages within {limit:g} s (state: {state})"
            elif session.state is SenderState.CONFIRMING:
                limit = self._settings.transfer_timeout
                reason = (
                    f"decode did not confirm that the pages are sound within {limit:g} s (state: {state})"
                )
            elif session.due <= now:
                limit = self._settings.receive_timeout
                reason = f"the pages were not delivered within {limit:g} s of being reserved (state: {state})"
            else:
                limit = self._settings.transfer_timeout
                reason = f"pages were still in flight after {limit:g} s (state: {state})"
            self.fail(session, reason, 504, "deadline")
        for entry in self.memory.expire(now):
            self._stats.deadline_hit("early reservation")
            limit = self._settings.bootstrap_timeout
            reason = f"the prefill worker got no request for this room within {limit:g} s of its reservation"
            self.drop_lease(entry.source, entry.reserve, reason, 504)
            self.remember_refusal(entry.reserve.room, reason, 504)

    def probe_draining(self, now: float) -> None:
        """Writes to a process that is no more will never become final by themselves on every transport."""
        for instance_id, proof in self._probe.take():
            logger.info("decode worker %s is gone: %s", instance_id, proof)
            self.lose_peer(instance_id, f"decode worker: {proof}", "peer_lost")
            self._peers.abandon(instance_id)
        if self._probe_at is None:
            return
        draining = {s.peer for s in self.sessions.values() if s.state is SenderState.DRAINING}
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
