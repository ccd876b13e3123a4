"""Prefill's side of page transfer: one object per scheduler process."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer import wire
from diptych.kvtransfer.bootstrap.route import RankRoute
from diptych.kvtransfer.errors import DuplicateRoom, TransferError
from diptych.kvtransfer.events import TransferEvent
from diptych.kvtransfer.parts import TransferParts
from diptych.kvtransfer.plane import Inbound, LinkDown
from diptych.kvtransfer.room_memory import EarlyReservation
from diptych.kvtransfer.sender_peers import DecodePeers
from diptych.kvtransfer.sender_rooms import SenderRooms
from diptych.kvtransfer.sender_session import FAILING, SenderSession
from diptych.kvtransfer.states import SenderState


class PrefillSender:
    """Pushes finished pages into decode's reserved pages. All calls from one thread; none blocks."""

    def __init__(self, parts: TransferParts) -> None:
        """The sender owns the parts from now on."""
        self._parts = parts
        self._backend = parts.backend
        self._settings = parts.settings
        self._stats = parts.stats
        self._control = parts.control
        self._clock = parts.clock
        self._peers = DecodePeers(parts)
        self._rooms = SenderRooms(parts, self._peers)
        self._closed = False

    @property
    def control_address(self) -> str:
        """`tcp://host:port`."""
        return self._control.address

    def route(
        self,
        *,
        worker_id: str,
        published: dict[str, dict[str, object]] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> RankRoute:
        """This rank's registration at the bootstrap service. `worker_id`: one per worker start; `published`:
        the bags that peers may know, by namespace."""
        return RankRoute(
            version=wire.PROTOCOL_VERSION,
            worker_id=worker_id,
            rank=rank,
            world_size=world_size,
            identity=self._parts.identity,
            control_address=self.control_address,
            fingerprint=self._parts.fingerprint,
            backend=self._backend.name,
            published=published or {},
        )

    @property
    def busy(self) -> bool:
        """Call `step()` again soon, without waiting for a socket: events are waiting, or writes are in
        flight on a backend that can't wake a poller."""
        if self._rooms.events:
            return True
        return self._backend.fileno() is None and any(s.writes for s in self._rooms.sessions.values())

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """Sockets and file descriptors whose readability means `step()` has work. Ask before each wait."""
        descriptor = self._backend.fileno()
        extra = [] if descriptor is None else [descriptor]
        return [*self._control.pollables(), self._parts.background.wakeup.fileno(), *extra]

    def next_deadline(self) -> float | None:
        """When, on the clock of the parts, `step()` must run at the latest; None when nothing is waiting."""
        if self._rooms.events:
            return 0.0
        candidates = (self._rooms.next_deadline(), self._control.next_deadline())
        return min((c for c in candidates if c is not None), default=None)

    def state(self, room: int) -> SenderState | None:
        """None when the room has no session."""
        session = self._rooms.sessions.get(room)
        return None if session is None else session.state

    def step(self) -> list[TransferEvent]:
        """Read control messages, poll writes, check deadlines. Events: `DestinationReady`, `Sent`,
        `Failed`, `Drained`."""
        self._parts.background.wakeup.clear()
        self._backend.clear_wakeup()
        for news in self._control.step():
            if isinstance(news, LinkDown):
                if self._peers.is_over(news.target, news.link):
                    continue
                self._rooms.lose_peer(news.target, f"decode worker: {news.reason}", "peer_lost")
            else:
                self._dispatch(news)
        for session in self._rooms.to_poll():
            self._rooms.poll(session)
        self._rooms.check_deadlines(self._clock())
        self._rooms.probe_draining(self._clock())
        self._peers.forget_lost({s.peer for s in self._rooms.sessions.values() if s.peer and s.writes})
        return self._rooms.take_events()

    # ---- the scheduler's calls ----------------------------------------------------------------------

    def open(self, room: int, num_prompt_tokens: int | None = None) -> None:
        """The request of this room has arrived. Raises `DuplicateRoom` while the room is active, its pages
        are draining, or `step()` has yet to say how it ended. A destination or a refusal that came earlier
        shows in the next `step()`.
        `num_prompt_tokens`: a reservation for another prompt fails the room before anything is written;
        None: compare `DestinationReady` yourself before the first `send`."""
        if self._rooms.is_taken(room):
            raise DuplicateRoom(room)
        deadline = self._clock() + self._settings.bootstrap_timeout
        session = SenderSession(room, deadline, num_prompt_tokens)
        self._rooms.sessions[room] = session
        self._rooms.memory.failed_here.pop(room, None)
        refusal = self._rooms.memory.refused.pop(room, None)
        early = self._rooms.memory.early.pop(room, None)
        if refusal is not None:
            self._rooms.fail(session, refusal.reason, refusal.status, "peer", tell=False)
        elif early is not None:
            self._rooms.bind(session, early.source, early.reserve)

    def send(self, room: int, src_pages: Sequence[int], first_page_index: int) -> None:
        """Push local pages as the request's pages `first_page_index ..`; those decode already has are
        skipped. Legal before the destination is known (the writes then wait for it). Raises `UnknownRoom`
        when the room has failed or ended (its `Failed` event may still be on its way), and `TransferError`
        when a page lies outside what decode reserved or outside the slab."""
        session = self._rooms.active(room)
        if session.state is SenderState.FINISHING or session.aux is not None:
            raise TransferError(f"room {room} is already finished")
        if session.reservation is None:
            session.queued.append((list(src_pages), first_page_index))
            return
        self._rooms.post(session, src_pages, first_page_index)

    def finish(self, room: int, aux: wire.AuxBlock) -> None:
        """The last page was sent. Once every write is final decode gets `aux`, and `Sent` follows.
        Raises `UnknownRoom` as `send` does."""
        session = self._rooms.active(room)
        if aux.room != room:
            raise TransferError(f"the aux block is stamped with room {aux.room}, not {room}")
        session.aux = aux
        session.finished_at = self._clock()
        if session.reservation is not None:
            session.move(SenderState.FINISHING)
            self._rooms.poll(session)

    def recall(self, room: int) -> None:
        """Take back everything sent to a room without a destination: its pages may be used again.
        Raises `UnknownRoom` as `send` does, and `TransferError` once the destination is known."""
        session = self._rooms.active(room)
        if session.reservation is not None:
            raise TransferError(f"room {room} has a destination: its pages may be on their way")
        session.queued.clear()
        session.aux = None

    def adopt(self, fingerprint: Fingerprint) -> None:
        """Other weights are served from now on. Decode workers have to greet again, and match once they serve
        the same. For when no room is active; what decode reserved without a request here is refused."""
        for instance_id in self._peers.adopt(fingerprint):
            self._rooms.lose_peer(instance_id, "prefill has other weights now", "mismatch")

    def abort(self, room: int, reason: str, status: int = 499) -> None:
        """Fail the room here and at decode. `Failed` (and `Drained`) follow from `step()`.
        No effect when the room isn't active."""
        session = self._rooms.sessions.get(room)
        if session is not None and session.state not in FAILING:
            self._rooms.fail(session, reason, status, "abort")

    def close(self) -> None:
        """Tell peers of active rooms, close sockets and the backend. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for room in list(self._rooms.sessions):
            self.abort(room, "the prefill worker is shutting down", 503)
        self._parts.close()

    # ---- messages -----------------------------------------------------------------------------------

    def _dispatch(self, inbound: Inbound) -> None:
        body = inbound.body
        if isinstance(body, wire.Hello):
            self._peers.hello(inbound, body)
        elif isinstance(body, wire.Reserve):
            self._reserve(inbound, body)
        elif isinstance(body, wire.Verified):
            self._rooms.verified(inbound.source, body)
        elif isinstance(body, wire.Abort):
            self._aborted(inbound, body)
        elif isinstance(body, wire.Refused):
            self._refused(inbound, body)
        else:
            self._stats.control_dropped("unexpected")

    def _refused(self, inbound: Inbound, refused: wire.Refused) -> None:
        target = inbound.link or inbound.source
        self._rooms.lose_peer(target, f"decode worker: {refused.reason}", "peer_lost")
        if refused.instance_id != target:
            # Another process answers at the address, so the one that was there has ended.
            self._peers.abandon(target)

    def _reserve(self, inbound: Inbound, reserve: wire.Reserve) -> None:
        source = inbound.source
        peer = self._peers.usable(source)
        if peer is None:
            self._peers.refuse_stranger(inbound)
            return
        if self._rooms.memory.ended(source, reserve.lease) is not None:
            # Its abort has overtaken it, or it comes once more: decode has been told how the lease ended, and
            # is told again when it asks.
            self._stats.control_dropped("unexpected")
            return
        problem = _reservation_problem(reserve, peer.num_pages)
        session = self._rooms.sessions.get(reserve.room)
        if problem is not None:
            self._stats.control_dropped("refused")
            self._rooms.drop_lease(source, reserve, f"reservation refused: {problem}", 400)
        elif session is not None and session.state is SenderState.AWAITING_DESTINATION:
            self._rooms.bind(session, source, reserve)
        elif self._is_known(source, reserve):
            # The same message once more.
            self._stats.control_dropped("unexpected")
        elif session is not None or reserve.room in self._rooms.memory.early:
            self._rooms.drop_lease(
                source, reserve, f"bootstrap_room {reserve.room} already has a destination", 400
            )
        elif (verdict := self._rooms.memory.failed_here.pop(reserve.room, None)) is not None:
            self._rooms.drop_lease(source, reserve, verdict.reason, verdict.status)
        else:
            deadline = self._clock() + self._settings.bootstrap_timeout
            self._rooms.memory.early[reserve.room] = EarlyReservation(source, reserve, deadline)

    def _is_known(self, source: str, reserve: wire.Reserve) -> bool:
        session = self._rooms.sessions.get(reserve.room)
        if session is not None and session.peer == source and session.lease == reserve.lease:
            return True
        early = self._rooms.memory.early.get(reserve.room)
        return early is not None and early.is_of(source, reserve.lease)

    def _aborted(self, inbound: Inbound, abort: wire.Abort) -> None:
        """Decode gave the room up, or asks again whether it has drained."""
        source, room = inbound.source, abort.room
        session = self._rooms.sessions.get(room)
        if session is not None and session.peer == source and session.lease == abort.lease:
            if session.state is SenderState.CONFIRMING:
                # The library said that every byte had arrived, and decode says otherwise.
                session.clean = False
            if session.state not in FAILING:
                self._rooms.fail(session, abort.reason, abort.status, "peer", tell=False)
            return
        clean = self._rooms.memory.ended(source, abort.lease)
        if clean is None:
            clean = True
            self._rooms.memory.end_lease(source, abort.lease, clean)
            early = self._rooms.memory.early.get(room)
            if session is not None and session.state is SenderState.AWAITING_DESTINATION:
                self._rooms.fail(session, abort.reason, abort.status, "peer", tell=False, remember=False)
            elif session is None and (early is None or early.is_of(source, abort.lease)):
                self._rooms.memory.early.pop(room, None)
                self._rooms.remember_refusal(room, abort.reason, abort.status)
        self._control.reply(inbound, wire.RoomDrained(room=room, lease=abort.lease, clean=clean))


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
