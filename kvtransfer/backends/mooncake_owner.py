"""The thread that submits to a Mooncake engine and asks how transfers fare.

The library has no way to wake anyone, and the first contact with a peer blocks. So this thread polls while
writes are in flight, wakes the scheduler when one turns final, and otherwise sleeps for good.

A descriptor is a run of pages that are adjacent on both sides. A few are in flight to a peer at a time, which
is as fast as more, and lets a peer that stalls be given up soon: what has not been submitted fails with the
first descriptor that does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from diptych.engine.background import Wakeup
from diptych.kvtransfer.backends.interface import Endpoint, PageWrite, WriteState
from diptych.kvtransfer.backends.mooncake_engine import MooncakeEngine, Progress

_MAX_ATTEMPTS = 3
"""To connect. When all its connections to a peer have broken, the library lets the next transfer fail at
once, and only then connects anew."""
_WINDOW = 16
"""Descriptors in flight to one peer. The library writes four at a time."""
_BUSY_POLL_S = 0.0002
_STALLED_POLL_S = 0.005
_STALLED_AFTER_S = 0.1
"""Without any news for so long, ask less often."""


@dataclass(slots=True)
class _Job:
    """What is left of one write."""

    write: PageWrite
    remaining: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Descriptor:
    job: _Job
    source: int
    target: int
    length: int


@dataclass(slots=True)
class _Peer:
    session: str
    base_address: int
    last_address: int
    """Of the slab's last byte."""
    opened: bool = False
    opening: int | None = None
    """The library's id of the transfer that tries the connection."""
    attempts: int = 0
    error: str = ""
    """Why nothing more is submitted to it."""
    waiting: deque[_Descriptor] = field(default_factory=deque)
    in_flight: dict[int, _Descriptor] = field(default_factory=dict)
    """By the library's id."""


class MooncakeOwner(threading.Thread):
    """The thread that submits and polls. `do` may be called from any thread; the other public methods run
    here, as commands."""

    def __init__(self, engine: MooncakeEngine, wakeup: Wakeup) -> None:
        super().__init__(name="mooncake-owner", daemon=True)
        self._engine = engine
        self._base_address = engine.endpoint.base_address
        self._page_bytes = engine.endpoint.page_bytes
        self._wakeup = wakeup
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._peers: dict[str, _Peer] = {}
        self._agents: dict[str, list[str]] = {}
        """Session → the workers that have had it, in order."""
        self._abandoned: list[int] = []
        """Transfers of peers that were disconnected: the library still has to be asked, to free them."""
        self._news_at = 0.0
        self._stopped = False

    def do(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    def run(self) -> None:
        while not self._stopped:
            try:
                self._commands.get(timeout=self._patience())()
                continue
            except queue.Empty:
                self._drive()
        self._close()

    def _patience(self) -> float | None:
        if any(peer.in_flight or peer.opening is not None for peer in self._peers.values()):
            stalled = time.monotonic() - self._news_at > _STALLED_AFTER_S
            return _STALLED_POLL_S if stalled else _BUSY_POLL_S
        return _STALLED_POLL_S if self._abandoned else None

    def _drive(self) -> None:
        for peer in self._peers.values():
            if peer.opening is not None:
                self._look_at_opening(peer)
            # In the order they were submitted, which is about the order they end in.
            for transfer, descriptor in list(peer.in_flight.items()):
                progress = self._engine.progress(transfer)
                if progress is Progress.IN_FLIGHT:
                    continue
                self._news_at = time.monotonic()
                del peer.in_flight[transfer]
                if progress is Progress.FAILED:
                    self._give_up(peer, "mooncake: the transfer failed; see the worker's log")
                self._end(descriptor, peer.error if progress is Progress.FAILED else "")
            self._submit(peer)
        self._abandoned = [t for t in self._abandoned if self._engine.progress(t) is Progress.IN_FLIGHT]

    def connect(self, name: str, endpoint: Endpoint, host: str, port: str) -> None:
        self.disconnect(name)
        # The library remembers for good where a session listens. A worker that got the port of one that
        # ended must go by another spelling, or pages would be sent where the old one listened.
        agents = self._agents.setdefault(f"{host}:{port}", [])
        if endpoint.agent not in agents:
            agents.append(endpoint.agent)
        zeros = "0" * agents.index(endpoint.agent)
        last = endpoint.base_address + endpoint.num_pages * endpoint.page_bytes - 1
        peer = _Peer(f"{host}:{zeros}{port}", endpoint.base_address, last)
        self._peers[name] = peer
        threading.Thread(target=self._probe, args=(peer,), name="mooncake-probe", daemon=True).start()

    def _probe(self, peer: _Peer) -> None:
        """In a thread of its own: a peer that is stopped just now must not hold up the others."""
        answers = self._engine.probe(peer.session)
        self.do(lambda: self._probed(peer, answers))

    def _probed(self, peer: _Peer, answers: bool) -> None:
        if self._stopped or not any(peer is known for known in self._peers.values()):
            return
        if answers:
            self._open(peer)
        else:
            self._give_up(peer, f"no connection to the peer's Mooncake engine at {peer.session}")

    def _open(self, peer: _Peer) -> None:
        peer.attempts += 1
        # The last byte: a slab that isn't all there is found out before anything is written to it.
        peer.opening = self._engine.touch(peer.session, peer.last_address)
        self._news_at = time.monotonic()
        if peer.opening is None:
            self._give_up(peer, f"the peer's Mooncake engine at {peer.session} refuses")

    def _look_at_opening(self, peer: _Peer) -> None:
        assert peer.opening is not None
        progress = self._engine.progress(peer.opening)
        if progress is Progress.IN_FLIGHT:
            return
        peer.opening = None
        if progress is Progress.DONE:
            peer.opened = True
        elif peer.attempts < _MAX_ATTEMPTS:
            self._open(peer)
        else:
            self._give_up(peer, f"no transfer to the peer's Mooncake engine at {peer.session} succeeds")

    def post(self, write: PageWrite, runs: list[tuple[int, int, int]]) -> None:
        job = _Job(write, len(runs))
        write.handle = job
        peer = self._peers.get(write.peer)
        if peer is None or peer.error or not runs:
            error = "the peer was disconnected" if peer is None else peer.error
            self._finish(job, error if runs else "")
            return
        size = self._page_bytes
        for src, dst, length in runs:
            source, target = self._base_address + src * size, peer.base_address + dst * size
            peer.waiting.append(_Descriptor(job, source, target, length * size))
        self._news_at = time.monotonic()
        self._submit(peer)

    def _submit(self, peer: _Peer) -> None:
        while peer.opened and peer.waiting and len(peer.in_flight) < _WINDOW:
            descriptor = peer.waiting.popleft()
            transfer = self._engine.submit(
                peer.session, descriptor.source, descriptor.target, descriptor.length
            )
            if transfer is None:
                self._give_up(peer, "mooncake refused the transfer; see the worker's log")
                self._end(descriptor, peer.error)
            else:
                peer.in_flight[transfer] = descriptor

    def _give_up(self, peer: _Peer, error: str) -> None:
        peer.error = peer.error or error
        waiting, peer.waiting = peer.waiting, deque()
        for descriptor in waiting:
            self._end(descriptor, peer.error)

    def _end(self, descriptor: _Descriptor, error: str) -> None:
        job = descriptor.job
        job.remaining -= 1
        job.error = job.error or error
        if job.remaining == 0:
            self._finish(job, job.error)

    def _finish(self, job: _Job, error: str) -> None:
        write = job.write
        write.error = error
        write.handle = None
        write.finished_at = time.monotonic()
        # Last: the scheduler's thread reads the rest once it sees a final state.
        write.state = WriteState.FAILED if error else WriteState.DONE
        self._wakeup.set()

    def disconnect(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        self._give_up(peer, "the peer was disconnected")
        self._abandoned += peer.in_flight
        if peer.opening is not None:
            self._abandoned.append(peer.opening)
        for descriptor in peer.in_flight.values():
            self._end(descriptor, "the peer was disconnected")

    def stop(self) -> None:
        self._stopped = True

    def _close(self) -> None:
        for name in list(self._peers):
            self.disconnect(name)
        self._engine.close()
