"""Decode's side of page transfer: one object per scheduler process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import zmq

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer import wire
from diptych.kvtransfer.bootstrap.client import LookupFailed
from diptych.kvtransfer.bootstrap.route import Route
from diptych.kvtransfer.errors import DuplicateRoom, TransferError, UnknownRoom
from diptych.kvtransfer.events import TransferEvent
from diptych.kvtransfer.parts import TransferParts
from diptych.kvtransfer.plane import Inbound, LinkDown
from diptych.kvtransfer.receiver_peers import PrefillPeers
from diptych.kvtransfer.receiver_rooms import ReceiverRooms
from diptych.kvtransfer.receiver_session import ReceiverSession
from diptych.kvtransfer.states import ReceiverState

_LOOKUP_RETRY_S = 0.25


class DecodeReceiver:
    """Finds prefill workers, shakes hands, and receives pages. All calls from one thread; none blocks."""

    def __init__(self, parts: TransferParts, *, rank: int = 0, world_size: int = 1) -> None:
        """The receiver owns the parts from now on."""
        self._parts = parts
        self._backend = parts.backend
        self._settings = parts.settings
        self._stats = parts.stats
        self._control = parts.control
        self._lookup = parts.lookup
        self._clock = parts.clock
        self._peers = PrefillPeers(parts, rank=rank, world_size=world_size)
        self._lookup_again: dict[tuple[str, int], float] = {}
        """Services that are not ready, and when to ask again."""
        self._leases = itertools.count(1)
        self._rooms = ReceiverRooms(parts, self._peers)
        self._expecting = False
        self._closed = False

    @property
    def control_address(self) -> str:
        """`tcp://host:port`."""
        return self._control.address

    @property
    def busy(self) -> bool:
        """Call `step()` again soon, without waiting for a socket: events or unverified pages are waiting."""
        return bool(self._rooms.events) or self._rooms.verifying()

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """Sockets and file descriptors whose readability means `step()` has work. Ask before each wait."""
        return [*self._control.pollables(), self._parts.background.wakeup.fileno()]

    def next_deadline(self) -> float | None:
        """When, on the clock of the parts, `step()` must run at the latest; None when nothing is waiting."""
        if self.busy:
            return 0.0
        candidates = [
            self._rooms.next_deadline(),
            self._control.next_deadline(),
            *self._lookup_again.values(),
        ]
        return min((c for c in candidates if c is not None), default=None)

    def state(self, room: int) -> ReceiverState | None:
        """None when the room has no session; `DRAINING` while its pages are quarantined."""
        session = self._rooms.sessions.get(room)
        return None if session is None else session.state

    def step(self) -> list[TransferEvent]:
        """Read control messages and look-ups, check deadlines. Events: `HandshakeDone`, `Received`,
        `Failed`, `Drained`."""
        self._parts.background.wakeup.clear()
        for key, answer in self._lookup.take():
            self._route_answer(key, answer)
        for news in self._control.step():
            if isinstance(news, LinkDown):
                self._rooms.lose_peer(news.target, f"prefill worker: {news.reason}", "peer_lost")
            else:
                self._dispatch(news)
        self._rooms.verify_some()
        now = self._clock()
        for key in [key for key, at in self._lookup_again.items() if at <= now]:
            del self._lookup_again[key]
            self._lookup.get(*key)
        self._rooms.check_deadlines(now)
        self._rooms.tend_quarantine(now)
        self._expect_writes()
        return self._rooms.take_events()

    # ---- the scheduler's calls ----------------------------------------------------------------------

    def open(self, room: int, host: str, port: int) -> None:
        """Start the handshake with the prefill worker whose bootstrap service is at `host:port`.
        Raises `DuplicateRoom` while the room is active, its pages are quarantined, or `step()` has yet to say
        how it ended."""
        if self._rooms.is_taken(room):
            raise DuplicateRoom(room)
        deadline = self._clock() + self._settings.handshake_timeout
        session = ReceiverSession(room, next(self._leases), (host, port), deadline)
        self._rooms.sessions[room] = session
        if session.bootstrap not in self._lookup_again:
            session.joined_lookup = self._lookup.is_running(host, port)
            route = self._lookup.get(host, port)
            if route is not None:
                self._meet(session, route)
        self._expect_writes()

    def reserve(
        self, room: int, pages: Sequence[int], num_prompt_tokens: int, first_page_index: int = 0
    ) -> None:
        """After `HandshakeDone`: prefill may now write the request's pages `first_page_index ..` onto
        `pages` of the local slab. Raises `UnknownRoom` when the room has failed meanwhile (its `Failed`
        event may still be on its way; nothing was reserved then)."""
        session = self._rooms.sessions.get(room)
        if session is None or session.state is not ReceiverState.AGREED:
            raise UnknownRoom(room)
        assert session.peer is not None
        reserve = wire.Reserve(
            room=room,
            lease=session.lease,
            pages=list(pages),
            num_prompt_tokens=num_prompt_tokens,
            first_page_index=first_page_index,
            checksum=self._settings.checksum,
        )
        self._peers.tell(session.peer, reserve)
        session.pages = reserve.pages
        session.num_prompt_tokens = num_prompt_tokens
        session.first_page_index = first_page_index
        session.move(ReceiverState.RECEIVING)
        session.deadline = self._clock() + self._settings.receive_timeout
        self._expect_writes()

    def adopt(self, fingerprint: Fingerprint) -> None:
        """Other weights are served from now on. Prefill workers are looked up and greeted again, and match
        once they serve the same. For when no room is active."""
        for instance_id in self._peers.adopt(fingerprint):
            self._rooms.lose_peer(instance_id, "decode has other weights now", "mismatch")

    def abort(self, room: int, reason: str, status: int = 499) -> None:
        """Fail the room here and at prefill. `Failed` (and `Drained`) follow from `step()`.
        No effect when the room isn't active."""
        session = self._rooms.sessions.get(room)
        if session is not None and session.state is not ReceiverState.DRAINING:
            self._rooms.fail(session, reason, status, "abort")

    def close(self) -> None:
        """Tell peers of active rooms, close sockets and the backend. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for room in list(self._rooms.sessions):
            self.abort(room, "the decode worker is shutting down", 503)
        self._parts.close()

    # ---- handshake ----------------------------------------------------------------------------------

    def _route_answer(self, key: tuple[str, int], answer: Route | LookupFailed) -> None:
        waiting = [s for s in self._rooms.sessions.values() if s.bootstrap == key and self._is_looking(s)]
        if isinstance(answer, Route):
            for session in waiting:
                self._meet(session, answer)
        elif answer.retry and waiting:
            self._lookup_again[key] = self._clock() + _LOOKUP_RETRY_S
        else:
            for session in waiting:
                if session.joined_lookup:
                    session.joined_lookup = False
                    self._lookup.get(*key)
                else:
                    self._rooms.fail(session, str(answer), 502, "lookup")

    @staticmethod
    def _is_looking(session: ReceiverSession) -> bool:
        return session.state is ReceiverState.HANDSHAKING and session.peer is None

    def _meet(self, session: ReceiverSession, route: Route) -> None:
        mismatch = self._peers.mismatch(route)
        peer = self._peers.from_route(route, session.bootstrap)
        if peer is None:
            self._rooms.fail(session, mismatch or "the route names no rank", 502, "mismatch")
            return
        greets = mismatch is None and not peer.welcomed
        try:
            if greets:
                self._peers.greet(peer)
            else:
                self._peers.link(peer)
        except TransferError as error:
            self._rooms.fail(session, f"prefill worker: {error}", 502, "lookup")
            return
        session.peer = peer.peer
        if mismatch is not None:
            # A worker restarted with other settings must be seen, so this answer isn't kept.
            self._lookup.invalidate(*session.bootstrap)
            self._rooms.fail(session, mismatch, 500, "mismatch")
        elif not greets:
            self._rooms.agree(peer.peer.instance_id)

    # ---- messages -----------------------------------------------------------------------------------

    def _dispatch(self, inbound: Inbound) -> None:
        body, source = inbound.body, inbound.source
        if isinstance(body, wire.Welcome):
            if self._peers.welcome(source, body.hello):
                self._rooms.agree(source)
        elif isinstance(body, wire.Complete):
            self._rooms.complete(source, body)
        elif isinstance(body, wire.Abort):
            self._rooms.aborted(source, body)
        elif isinstance(body, wire.RoomDrained):
            self._rooms.room_drained(source, body)
        elif isinstance(body, wire.Refused):
            self._refused(inbound, body)
        else:
            self._stats.control_dropped("unexpected")

    def _refused(self, inbound: Inbound, refused: wire.Refused) -> None:
        target = inbound.link or inbound.source
        if inbound.link is None and not self._peers.is_current(target, refused.hello):
            # An earlier contact was lost, and word of it comes late: no room of this one was in it.
            self._stats.control_dropped("unexpected")
            return
        reason = f"prefill worker: {refused.reason}"
        # Nobody has run anything for a room that was not reserved: worth another try.
        self._rooms.lose_peer(target, reason, "peer_lost", status=refused.status, unreserved=503)
        if refused.instance_id != target:
            # Another process answers at the address, so the one that was there has ended.
            self._rooms.declare_dead(target)

    def _expect_writes(self) -> None:
        """Tell the backend whether a prefill worker may write, or wire up, right now."""
        expecting = bool(self._rooms.sessions) or self._peers.greeting()
        if expecting != self._expecting:
            self._expecting = expecting
            self._backend.expect_writes(expecting)
