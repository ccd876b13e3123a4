"""The rooms of a decode worker: their failures, their quarantined pages, and how they end."""

from __future__ import annotations

import logging

from diptych.kvtransfer import wire
from diptych.kvtransfer.checksum import Verification, checksum_of_aux
from diptych.kvtransfer.events import Drained, Failed, HandshakeDone, Received, TransferEvent
from diptych.kvtransfer.parts import TransferParts
from diptych.kvtransfer.quarantine import Held, Quarantine
from diptych.kvtransfer.receiver_peers import PrefillPeers
from diptych.kvtransfer.receiver_session import ReceiverSession
from diptych.kvtransfer.states import ReceiverState
from diptych.kvtransfer.stats import FailureKind

logger = logging.getLogger(__name__)

_VERIFY_BYTES = 32 << 20
"""How much is compared per step: a few milliseconds."""
_RESERVED = frozenset({ReceiverState.RECEIVING, ReceiverState.VERIFYING})
"""Prefill knows the pages."""
_TERMINAL = frozenset({ReceiverState.DONE, ReceiverState.FAILED, ReceiverState.DRAINED})
"""No session stays in one of these."""


class ReceiverRooms:
    """Sessions by room, and every move they make. The owner passes on what peers and the scheduler say."""

    def __init__(self, parts: TransferParts, peers: PrefillPeers) -> None:
        self._page_size = parts.fingerprint.page_size
        self._vocab_size = parts.fingerprint.vocab_size
        self._page_bytes = parts.backend.endpoint().page_bytes
        self._checksums = parts.checksums
        self._peers = peers
        self._probe = parts.probe
        self._settings = parts.settings
        self._stats = parts.stats
        self._clock = parts.clock
        heartbeat = parts.settings.heartbeat_interval
        self._quarantine = Quarantine(ask_interval=2 * heartbeat, settle=heartbeat)
        self.sessions: dict[int, ReceiverSession] = {}
        self.events: list[TransferEvent] = []
        self._stats.watch(
            [state for state in ReceiverState if state not in _TERMINAL],
            lambda state: sum(s.state is state for s in self.sessions.values()),
            lambda: self._quarantine.num_pages,
        )

    def next_deadline(self) -> float | None:
        candidates = [s.deadline for s in self.sessions.values()]
        candidates.append(self._quarantine.next_deadline())
        return min((c for c in candidates if c is not None), default=None)

    def take_events(self) -> list[TransferEvent]:
        events, self.events = self.events, []
        return events

    def is_taken(self, room: int) -> bool:
        """By a session, or by one whose last event nobody has seen: it would be taken for its successor's."""
        return room in self.sessions or any(event.room == room for event in self.events)

    def _session_of(self, source: str, room: int, lease: int) -> ReceiverSession | None:
        """The session a message from prefill is about; None when it is about none."""
        session = self.sessions.get(room)
        if session is None or not session.is_with(source) or session.lease != lease:
            return None
        return session

    def agree(self, instance_id: str) -> None:
        """That prefill worker has accepted this one."""
        for session in self.sessions.values():
            if session.is_with(instance_id) and session.state is ReceiverState.HANDSHAKING:
                session.move(ReceiverState.AGREED)
                # Prefill waits as long for the reservation; after that its side of the room is gone.
                session.deadline = self._clock() + self._settings.bootstrap_timeout
                self.events.append(HandshakeDone(session.room))

    def complete(self, source: str, complete: wire.Complete) -> None:
        session = self._session_of(source, complete.room, complete.lease)
        if session is None:
            self._stats.control_dropped("foreign")
            return
        if session.state is ReceiverState.RECEIVING:
            problem = session.problem(complete, page_size=self._page_size, vocab_size=self._vocab_size)
            if problem is None:
                if self._settings.checksum:
                    self._begin_verifying(session, complete)
                else:
                    self._end_done(session, complete)
                return
            self.fail(session, problem, 502, "protocol")
        # Every write was final before prefill sent this, whatever became of the room since.
        self._quarantine.drained(source, complete.room, complete.lease, True, self._clock())

    def _end_done(self, session: ReceiverSession, complete: wire.Complete) -> None:
        session.move(ReceiverState.DONE)
        del self.sessions[session.room]
        self._stats.received(complete.num_pages, self._page_bytes)
        self.events.append(Received(session.room, complete.aux))

    def _begin_verifying(self, session: ReceiverSession, complete: wire.Complete) -> None:
        """`verify_some` goes on with it. The room's deadline stays."""
        checksums = complete.checksums
        session.move(ReceiverState.VERIFYING)
        if checksums is None or len(checksums.pages) != complete.num_pages:
            self.fail(session, "prefill sent no checksums, or not one for each page", 502, "checksum")
        elif checksum_of_aux(complete.aux) != checksums.aux:
            reason = "what comes with the pages (first token, logprobs) arrived damaged: its checksum differs"
            self.fail(session, reason, 502, "checksum")
        else:
            session.complete = complete
            session.verification = Verification(
                self._checksums, session.pages, session.first_page_index, checksums.pages
            )

    def verifying(self) -> bool:
        return any(session.verification is not None for session in self.sessions.values())

    def verify_some(self) -> None:
        """Compare the next pages of the rooms that wait for it, oldest first."""
        budget = max(1, _VERIFY_BYTES // self._page_bytes)
        for session in list(self.sessions.values()):
            verification, complete = session.verification, session.complete
            if verification is None or complete is None or budget <= 0:
                continue
            left = verification.num_left
            with self._stats.checksum_seconds.time():
                problem = verification.advance(budget)
            budget -= left - verification.num_left
            if problem is not None:
                self.fail(session, problem, 502, "checksum")
            elif verification.num_left == 0:
                assert session.peer is not None
                self._peers.tell(session.peer, wire.Verified(room=session.room, lease=session.lease))
                self._end_done(session, complete)

    def aborted(self, source: str, abort: wire.Abort) -> None:
        session = self._session_of(source, abort.room, abort.lease)
        if session is None:
            self._stats.control_dropped("foreign")
        elif session.state is not ReceiverState.DRAINING:
            self.fail(session, abort.reason, abort.status, "peer", tell=False)

    def room_drained(self, source: str, drained: wire.RoomDrained) -> None:
        session = self._session_of(source, drained.room, drained.lease)
        if session is not None and session.state in _RESERVED:
            # Prefill's abort got lost on the way.
            self.fail(session, "the prefill worker gave the room up", 502, "peer", tell=False)
        self._quarantine.drained(source, drained.room, drained.lease, drained.clean, self._clock())

    def lose_peer(
        self,
        instance_id: str,
        reason: str,
        kind: FailureKind,
        *,
        status: int = 502,
        unreserved: int | None = None,
    ) -> None:
        """`status`: of its rooms, but for those without a reservation if `unreserved` is given."""
        peer = self._peers.lose(instance_id)
        if peer is None:
            return
        logger.warning("prefill worker at %s lost: %s", peer.control_address, reason)
        for session in list(self.sessions.values()):
            if session.is_with(instance_id) and session.state is not ReceiverState.DRAINING:
                says = status if unreserved is None or session.state in _RESERVED else unreserved
                self.fail(session, reason, says, kind, tell=False)

    def fail(
        self, session: ReceiverSession, reason: str, status: int, kind: FailureKind, *, tell: bool = True
    ) -> None:
        """`tell`: let prefill know; not when it said so itself, or is lost."""
        reserved = session.state in _RESERVED
        session.verification = session.complete = None
        peer = session.peer
        session.move(ReceiverState.FAILED)
        session.deadline = None
        self._stats.failed(kind)
        if tell and peer is not None:
            self._peers.tell(
                peer, wire.Abort(room=session.room, lease=session.lease, reason=reason, status=status)
            )
        self.events.append(Failed(session.room, reason, status, not reserved))
        if not reserved:
            session.move(ReceiverState.DRAINED)
            del self.sessions[session.room]
            return
        assert peer is not None
        session.move(ReceiverState.DRAINING)
        ask_at = self._clock() + 2 * self._settings.heartbeat_interval
        self._quarantine.add(
            Held(session.room, session.lease, len(session.pages), peer, reason, status, ask_at)
        )

    def check_deadlines(self, now: float) -> None:
        for session in list(self.sessions.values()):
            if session.deadline is None or session.deadline > now:
                continue
            state = session.state.value
            self._stats.deadline_hit(state)
            if session.state is ReceiverState.RECEIVING:
                limit = self._settings.receive_timeout
                reason = f"prefill did not deliver the pages within {limit:g} s (state: {state})"
            elif session.state is ReceiverState.VERIFYING:
                limit = self._settings.receive_timeout
                reason = f"the pages were not compared within {limit:g} s of being reserved (state: {state})"
            elif session.state is ReceiverState.AGREED:
                limit = self._settings.bootstrap_timeout
                reason = f"no KV pages became free for the prompt within {limit:g} s (state: {state})"
            else:
                limit = self._settings.handshake_timeout
                reason = f"no agreement with the prefill worker within {limit:g} s (state: {state})"
                if session.peer is not None:
                    self._peers.unanswered(session.peer.instance_id)
            self.fail(session, reason, 504, "deadline")

    def declare_dead(self, instance_id: str) -> None:
        """Its process has ended: it can post nothing any more."""
        self._quarantine.dead(instance_id, self._clock())

    def tend_quarantine(self, now: float) -> None:
        for instance_id, proof in self._probe.take():
            logger.info("prefill worker %s is gone: %s", instance_id, proof)
            self.declare_dead(instance_id)
        for held in self._quarantine.to_ask(now):
            abort = wire.Abort(room=held.room, lease=held.lease, reason=held.reason, status=held.status)
            self._peers.tell(held.peer, abort)
            self._probe.submit(held.peer)
        for held in self._quarantine.released(now):
            session = self.sessions.pop(held.room)
            session.move(ReceiverState.DRAINED)
            self.events.append(Drained(held.room))
