"""Decode's side of page transfer: one object per scheduler process."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import zmq

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer import wire
from diptych.kvtransfer.backends.interface import TransferBackend
from diptych.kvtransfer.bootstrap.client import LookupFailed, RouteLookup
from diptych.kvtransfer.bootstrap.route import Route
from diptych.kvtransfer.control import ControlEndpoint, Inbound, LinkDown
from diptych.kvtransfer.errors import DuplicateRoom, UnknownRoom
from diptych.kvtransfer.events import Drained, Failed, HandshakeDone, Received, TransferEvent
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.probe import DeathProbe, Peer
from diptych.kvtransfer.quarantine import Held, Quarantine
from diptych.kvtransfer.receiver_peers import PrefillPeers
from diptych.kvtransfer.receiver_session import ReceiverSession
from diptych.kvtransfer.settings import TransferSettings
from diptych.kvtransfer.states import ReceiverState
from diptych.kvtransfer.stats import TransferStats
from diptych.kvtransfer.wakeup import Wakeup

logger = logging.getLogger(__name__)

_LOOKUP_RETRY_S = 0.25
_LOOKUP_THREADS = 4


class DecodeReceiver:
    """Finds prefill workers, shakes hands, and receives pages. All calls from one thread; none blocks."""

    def __init__(
        self,
        *,
        backend: TransferBackend,
        fingerprint: Fingerprint,
        identity: Identity,
        host: str,
        port: int = 0,
        rank: int = 0,
        world_size: int = 1,
        settings: TransferSettings,
        stats: TransferStats,
    ) -> None:
        """Bind the control socket on `host` (also what is advertised; port 0 picks a free one).
        The receiver owns the backend from now on. Raises `zmq.ZMQError` when it can't bind."""
        self._backend = backend
        self._page_size = fingerprint.page_size
        self._settings = settings
        self._stats = stats
        heartbeat = settings.heartbeat_interval
        self._control = ControlEndpoint(identity, host, port, heartbeat, stats)
        self._peers = PrefillPeers(
            self._control, backend, fingerprint, identity, stats, rank=rank, world_size=world_size
        )
        self._pool = ThreadPoolExecutor(max_workers=_LOOKUP_THREADS, thread_name_prefix="bootstrap")
        self._wakeup = Wakeup()
        self._lookup = RouteLookup(self._pool, self._wakeup)
        self._lookup_again: dict[tuple[str, int], float] = {}
        """Services that are not ready, and when to ask again."""
        self._probe = DeathProbe(self._pool, self._wakeup)
        self._quarantine = Quarantine(ask_interval=2 * heartbeat, settle=heartbeat)
        self._leases = itertools.count(1)
        self._sessions: dict[int, ReceiverSession] = {}
        self._events: list[TransferEvent] = []
        self._expecting = False
        self._closed = False

    @property
    def control_address(self) -> str:
        """`tcp://host:port`."""
        return self._control.address

    @property
    def busy(self) -> bool:
        """Call `step()` again soon, without waiting for a socket: events are waiting."""
        return bool(self._events)

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """Sockets and file descriptors whose readability means `step()` has work. Ask before each wait."""
        return [*self._control.pollables(), self._wakeup.fileno()]

    def next_deadline(self) -> float | None:
        """`time.monotonic()` value at which `step()` must run at the latest; None when nothing is waiting."""
        if self._events:
            return 0.0
        candidates = [s.deadline for s in self._sessions.values()]
        candidates += [self._quarantine.next_deadline(), *self._lookup_again.values()]
        return min((c for c in candidates if c is not None), default=None)

    def state(self, room: int) -> ReceiverState | None:
        """None when the room has no session; `DRAINING` while its pages are quarantined."""
        session = self._sessions.get(room)
        return None if session is None else session.state

    def step(self) -> list[TransferEvent]:
        """Read control messages and look-ups, check deadlines. Events: `HandshakeDone`, `Received`,
        `Failed`, `Drained`."""
        self._wakeup.clear()
        for key, answer in self._lookup.take():
            self._route_answer(key, answer)
        for news in self._control.step():
            if isinstance(news, LinkDown):
                self._lose_peer(news.target, f"prefill worker: {news.reason}", "peer_lost")
            else:
                self._dispatch(news)
        now = time.monotonic()
        for key in [key for key, at in self._lookup_again.items() if at <= now]:
            del self._lookup_again[key]
            self._lookup.get(*key)
        self._check_deadlines(now)
        self._tend_quarantine(now)
        self._expect_writes()
        events, self._events = self._events, []
        return events

    # ---- the scheduler's calls ----------------------------------------------------------------------

    def open(self, room: int, host: str, port: int) -> None:
        """Start the handshake with the prefill worker whose bootstrap service is at `host:port`.
        Raises `DuplicateRoom` while the room is active or its pages are quarantined."""
        if room in self._sessions:
            raise DuplicateRoom(room)
        deadline = time.monotonic() + self._settings.handshake_timeout
        session = ReceiverSession(room, next(self._leases), (host, port), deadline)
        self._sessions[room] = session
        if session.bootstrap not in self._lookup_again:
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
        session = self._sessions.get(room)
        if session is None or session.state is not ReceiverState.AGREED:
            raise UnknownRoom(room)
        assert session.peer is not None
        peer = self._peers.get(session.peer)
        assert peer is not None
        reserve = wire.Reserve(
            room=room,
            lease=session.lease,
            pages=list(pages),
            num_prompt_tokens=num_prompt_tokens,
            first_page_index=first_page_index,
        )
        self._peers.tell(peer.peer, reserve)
        session.pages = reserve.pages
        session.num_prompt_tokens = num_prompt_tokens
        session.first_page_index = first_page_index
        session.move(ReceiverState.RECEIVING)
        session.deadline = time.monotonic() + self._settings.receive_timeout
        self._expect_writes()

    def abort(self, room: int, reason: str, status: int = 499) -> None:
        """Fail the room here and at prefill. `Failed` (and `Drained`) follow from `step()`.
        No effect when the room isn't active."""
        session = self._sessions.get(room)
        if session is not None and session.state is not ReceiverState.DRAINING:
            self._fail(session, reason, status, "abort")

    def close(self) -> None:
        """Tell peers of active rooms, close sockets and the backend. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for room in list(self._sessions):
            self.abort(room, "the decode worker is shutting down", 503)
        self._control.close()
        self._backend.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._wakeup.close()

    # ---- handshake ----------------------------------------------------------------------------------

    def _route_answer(self, key: tuple[str, int], answer: Route | LookupFailed) -> None:
        waiting = [s for s in self._sessions.values() if s.bootstrap == key and self._is_looking(s)]
        if isinstance(answer, Route):
            for session in waiting:
                self._meet(session, answer)
        elif answer.retry and waiting:
            self._lookup_again[key] = time.monotonic() + _LOOKUP_RETRY_S
        else:
            for session in waiting:
                self._fail(session, str(answer), 502, "lookup")

    @staticmethod
    def _is_looking(session: ReceiverSession) -> bool:
        return session.state is ReceiverState.HANDSHAKING and session.peer is None

    def _meet(self, session: ReceiverSession, route: Route) -> None:
        mismatch = self._peers.mismatch(route)
        peer = self._peers.from_route(route, session.bootstrap)
        if peer is None:
            self._fail(session, mismatch or "the route names no rank", 502, "mismatch")
            return
        session.peer = peer.peer.instance_id
        if mismatch is not None:
            # A worker restarted with other settings must be seen, so this answer isn't kept.
            self._lookup.invalidate(*session.bootstrap)
            self._fail(session, mismatch, 500, "mismatch")
        elif peer.welcomed:
            self._agree(session)
        else:
            self._peers.greet(peer)

    def _agree(self, session: ReceiverSession) -> None:
        session.move(ReceiverState.AGREED)
        session.deadline = None
        self._events.append(HandshakeDone(session.room))

    # ---- messages -----------------------------------------------------------------------------------

    def _dispatch(self, inbound: Inbound) -> None:
        body, source = inbound.body, inbound.source
        if isinstance(body, wire.Welcome):
            if self._peers.welcome(source):
                for session in list(self._sessions.values()):
                    if session.peer == source and session.state is ReceiverState.HANDSHAKING:
                        self._agree(session)
        elif isinstance(body, wire.Complete):
            self._complete(source, body)
        elif isinstance(body, wire.Abort):
            self._aborted(source, body)
        elif isinstance(body, wire.RoomDrained):
            self._room_drained(source, body)
        elif isinstance(body, wire.Refused):
            self._refused(inbound, body)
        else:
            self._stats.control_dropped("unexpected")

    def _aborted(self, source: str, abort: wire.Abort) -> None:
        session = self._session_of(source, abort.room, abort.lease)
        if session is None:
            self._stats.control_dropped("foreign")
        elif session.state is not ReceiverState.DRAINING:
            self._fail(session, abort.reason, abort.status, "peer", tell=False)

    def _room_drained(self, source: str, drained: wire.RoomDrained) -> None:
        session = self._session_of(source, drained.room, drained.lease)
        if session is not None and session.state is ReceiverState.RECEIVING:
            # Prefill's abort got lost on the way.
            self._fail(session, "the prefill worker gave the room up", 502, "peer", tell=False)
        self._quarantine.drained(source, drained.room, drained.lease, drained.clean, time.monotonic())

    def _refused(self, inbound: Inbound, refused: wire.Refused) -> None:
        target = inbound.source if isinstance(inbound.via, bytes) else inbound.via.target
        self._lose_peer(target, f"prefill worker: {refused.reason}", "peer_lost")
        if refused.instance_id != target:
            # Another process answers at the address, so the one that was there has ended.
            self._quarantine.dead(target, time.monotonic())

    def _session_of(self, source: str, room: int, lease: int) -> ReceiverSession | None:
        """The session a message from prefill is about; None when it is about none."""
        session = self._sessions.get(room)
        if session is None or session.peer != source or session.lease != lease:
            return None
        return session

    def _complete(self, source: str, complete: wire.Complete) -> None:
        session = self._session_of(source, complete.room, complete.lease)
        if session is None:
            self._stats.control_dropped("foreign")
            return
        if session.state is ReceiverState.RECEIVING:
            aux = complete.aux
            problem = session.incomplete(complete.num_pages, aux.prompt_tokens, self._page_size)
            if aux.room != session.room:
                problem = f"the aux block is stamped with room {aux.room}, not {session.room}"
            if problem is None:
                session.move(ReceiverState.DONE)
                del self._sessions[session.room]
                self._stats.received(complete.num_pages, self._backend.endpoint().page_bytes)
                self._events.append(Received(session.room, aux))
                return
            self._fail(session, problem, 502, "protocol", tell=False)
        # Every write was final before prefill sent this, whatever became of the room since.
        self._quarantine.drained(source, complete.room, complete.lease, True, time.monotonic())

    # ---- ends ---------------------------------------------------------------------------------------

    def _lose_peer(self, instance_id: str, reason: str, kind: str) -> None:
        peer = self._peers.lose(instance_id)
        if peer is None:
            return
        logger.warning("prefill worker at %s lost: %s", peer.peer.control_address, reason)
        self._control.unlink(instance_id)
        if peer.peer.bootstrap is not None:
            self._lookup.invalidate(*peer.peer.bootstrap)
        for session in list(self._sessions.values()):
            if session.peer == instance_id and session.state is not ReceiverState.DRAINING:
                self._fail(session, reason, 502, kind, tell=False, lost=peer.peer)

    def _fail(
        self,
        session: ReceiverSession,
        reason: str,
        status: int,
        kind: str,
        *,
        tell: bool = True,
        lost: Peer | None = None,
    ) -> None:
        reserved = session.state is ReceiverState.RECEIVING
        known = self._peers.get(session.peer) if session.peer is not None else None
        peer = lost or (known.peer if known is not None else None)
        session.move(ReceiverState.FAILED)
        session.deadline = None
        self._stats.failed(kind)
        if tell and peer is not None:
            self._peers.tell(
                peer, wire.Abort(room=session.room, lease=session.lease, reason=reason, status=status)
            )
        self._events.append(Failed(session.room, reason, status, not reserved))
        if not reserved:
            session.move(ReceiverState.DRAINED)
            del self._sessions[session.room]
            return
        assert peer is not None
        session.move(ReceiverState.DRAINING)
        ask_at = time.monotonic() + 2 * self._settings.heartbeat_interval
        self._quarantine.add(
            Held(session.room, session.lease, len(session.pages), peer, reason, status, ask_at)
        )
        self._stats.quarantined_pages.set(self._quarantine.num_pages)

    def _check_deadlines(self, now: float) -> None:
        for session in list(self._sessions.values()):
            if session.deadline is None or session.deadline > now:
                continue
            state = session.state.value
            self._stats.deadline_hit(state)
            if session.state is ReceiverState.RECEIVING:
                limit = self._settings.receive_timeout
                reason = f"prefill did not deliver the pages within {limit:g} s (state: {state})"
            else:
                limit = self._settings.handshake_timeout
                reason = f"no agreement with the prefill worker within {limit:g} s (state: {state})"
            self._fail(session, reason, 504, "deadline")

    def _tend_quarantine(self, now: float) -> None:
        for instance_id, proof in self._probe.take():
            logger.info("prefill worker %s is gone: %s", instance_id, proof)
            self._quarantine.dead(instance_id, now)
        for held in self._quarantine.to_ask(now):
            abort = wire.Abort(room=held.room, lease=held.lease, reason=held.reason, status=held.status)
            self._peers.tell(held.peer, abort)
            self._probe.submit(held.peer)
        released = self._quarantine.released(now)
        for held in released:
            session = self._sessions.pop(held.room)
            session.move(ReceiverState.DRAINED)
            self._events.append(Drained(held.room))
        if released:
            self._stats.quarantined_pages.set(self._quarantine.num_pages)

    def _expect_writes(self) -> None:
        """Tell the backend whether a prefill worker may write, or wire up, right now."""
        expecting = bool(self._sessions) or self._peers.greeting()
        if expecting != self._expecting:
            self._expecting = expecting
            self._backend.expect_writes(expecting)
