"""Page transfer over NIXL (UCX). One thread owns the agent and drives it.

A transfer over TCP moves only while both ends call into UCX, and a post over cross-memory attach *is* the
copy (it takes its time, without the interpreter lock). Neither may wait for, or hold up, a forward step of
the scheduler: so the scheduler hands each call to the owner thread, which works while a write is in flight or
expected, wakes the scheduler when one turns final, and otherwise sleeps for good.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from diptych.engine.background import Wakeup
from diptych.kvtransfer.backends.interface import (
    Endpoint,
    PageWrite,
    TransferBackend,
    WriteState,
    check_endpoint,
    new_write,
)
from diptych.kvtransfer.backends.nixl_agent import NixlAgent, configure_ucx
from diptych.kvtransfer.errors import TransferError

logger = logging.getLogger(__name__)

_SENDING_POLL_S = 0.0001
_RECEIVING_POLL_S = 0.001
_WIRE_UP_S = 1.0
"""How long after `connect` the agent is driven at least, so that both ends finish wiring up."""
_CLOSE_TIMEOUT_S = 10.0


class NixlBackend(TransferBackend):
    name: ClassVar[str] = "nixl"

    def __init__(
        self,
        slab: torch.Tensor,
        *,
        page_bytes: int,
        agent: str,
        ucx_tls: str | None = None,
        loopback: bool = False,
    ) -> None:
        """`loopback`: this worker is reachable from its own host only. Raises `TransferError` when NIXL
        can't be loaded or refuses the memory."""
        transports = configure_ucx(
            on_cpu=not slab.is_cuda,
            ucx_tls=ucx_tls,
            loopback=loopback,
            verbose=logger.isEnabledFor(logging.INFO),
        )
        self._slab = slab
        """Kept alive: the library holds its address."""
        self._page_bytes = page_bytes
        self._num_pages = slab.numel() * slab.element_size() // page_bytes
        library = NixlAgent(slab, page_bytes=page_bytes, name=agent)
        self._endpoint = library.endpoint()
        self._peers: dict[str, int] = {}
        """Peer → pages of its slab, as the scheduler's thread knows it."""
        self._wakeup = Wakeup()
        self._owner = _Owner(library, self._wakeup)
        self._owner.start()
        logger.info("nixl agent %s: %d pages, UCX may use %s", agent, self._num_pages, transports)

    def endpoint(self) -> Endpoint:
        return self._endpoint

    def connect(self, peer: str, endpoint: Endpoint) -> None:
        check_endpoint(endpoint, backend=self.name, page_bytes=self._page_bytes)
        self._peers[peer] = endpoint.num_pages
        self._owner.do(lambda: self._owner.connect(peer, endpoint))

    def post_write(self, peer: str, src_pages: Sequence[int], dst_pages: Sequence[int]) -> PageWrite:
        write = new_write(
            peer,
            src_pages,
            dst_pages,
            page_bytes=self._page_bytes,
            num_pages=self._num_pages,
            peer_pages=self._peers.get(peer),
        )
        src, dst = list(src_pages), list(dst_pages)
        self._owner.do(lambda: self._owner.post(write, src, dst))
        return write

    def poll(self, write: PageWrite) -> WriteState:
        if write.state is WriteState.IN_FLIGHT and not self._owner.is_alive():
            raise TransferError("the thread that drives nixl has died")
        return write.state

    def expect_writes(self, expected: bool) -> None:
        self._owner.do(lambda: self._owner.expect(expected))

    def fileno(self) -> int | None:
        return self._wakeup.fileno()

    def clear_wakeup(self) -> None:
        self._wakeup.clear()

    def disconnect(self, peer: str) -> None:
        if self._peers.pop(peer, None) is not None:
            self._owner.do(lambda: self._owner.disconnect(peer))

    def close(self) -> None:
        if not self._owner.is_alive():
            return
        self._owner.do(self._owner.stop)
        self._owner.join(_CLOSE_TIMEOUT_S)
        if self._owner.is_alive():
            # The library is stuck in a call; its memory must then stay as it is until the process ends.
            logger.error("nixl did not shut down within %g s", _CLOSE_TIMEOUT_S)
            return
        self._wakeup.close()


class _Owner(threading.Thread):
    """The one thread that touches the agent. `do` may be called from the scheduler's thread; the other
    public methods run here, as commands."""

    def __init__(self, library: NixlAgent, wakeup: Wakeup) -> None:
        super().__init__(name="nixl-owner", daemon=True)
        self._library = library
        self._wakeup = wakeup
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._in_flight: list[PageWrite] = []
        self._stuck: list[Any] = []
        """Handles of abandoned writes which the library can't release yet."""
        self._refused: dict[str, str] = {}
        """Peers the library could not connect to, and why."""
        self._expecting = False
        self._wiring_until = 0.0
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
        if self._in_flight:
            return _SENDING_POLL_S
        if self._expecting or time.monotonic() < self._wiring_until:
            return _RECEIVING_POLL_S
        return None

    def _drive(self) -> None:
        try:
            self._library.progress()
        except TransferError as error:
            logger.warning("%s", error)
        finished = False
        for write in list(self._in_flight):
            try:
                self._note(write, self._library.state(write.handle))
            except TransferError as error:
                self._finish(write, WriteState.FAILED, str(error))
            finished |= write.state is not WriteState.IN_FLIGHT
        if finished:
            self._wakeup.set()

    def connect(self, peer: str, endpoint: Endpoint) -> None:
        try:
            if self._library.has_peer(peer):
                self._library.remove_peer(peer)
            self._library.add_peer(peer, endpoint)
            self._refused.pop(peer, None)
            self._wiring_until = time.monotonic() + _WIRE_UP_S
        except TransferError as error:
            logger.warning("can't connect to peer %s: %s", peer, error)
            self._refused[peer] = str(error)

    def post(self, write: PageWrite, src_pages: list[int], dst_pages: list[int]) -> None:
        self._in_flight.append(write)
        refusal = self._refused.get(write.peer)
        if refusal is not None or not self._library.has_peer(write.peer):
            self._finish(write, WriteState.FAILED, refusal or "the peer was disconnected")
        else:
            try:
                write.handle, state = self._library.write(write.peer, src_pages, dst_pages)
                self._note(write, state)
            except TransferError as error:
                self._finish(write, WriteState.FAILED, str(error))
        if write.state is not WriteState.IN_FLIGHT:
            self._wakeup.set()

    def expect(self, expected: bool) -> None:
        self._expecting = expected

    def disconnect(self, peer: str) -> None:
        for write in [w for w in self._in_flight if w.peer == peer]:
            self._finish(write, WriteState.FAILED, "the peer was disconnected")
        self._refused.pop(peer, None)
        if self._library.has_peer(peer):
            try:
                self._library.remove_peer(peer)
            except TransferError as error:
                logger.warning("can't remove peer %s: %s", peer, error)
        self._release_stuck()
        self._wakeup.set()

    def stop(self) -> None:
        self._stopped = True

    def _note(self, write: PageWrite, state: str) -> None:
        if state == "DONE":
            self._finish(write, WriteState.DONE, "")
        elif state != "PROC":
            self._finish(write, WriteState.FAILED, f"nixl: transfer ended in state {state}")

    def _finish(self, write: PageWrite, state: WriteState, error: str) -> None:
        self._in_flight.remove(write)
        handle, write.handle = write.handle, None
        if handle is not None:
            try:
                self._library.release(handle)
            except TransferError as refusal:
                logger.info("a transfer handle stays for now: %s", refusal)
                self._stuck.append(handle)
        write.error = error
        write.finished_at = time.monotonic()
        # Last: the scheduler's thread reads the rest once it sees a final state.
        write.state = state

    def _release_stuck(self) -> None:
        for handle in list(self._stuck):
            try:
                self._library.release(handle)
                self._stuck.remove(handle)
            except TransferError:
                logger.debug("a transfer handle is still stuck")

    def _close(self) -> None:
        for write in list(self._in_flight):
            self._finish(write, WriteState.FAILED, "the backend was closed")
        self._release_stuck()
        try:
            self._library.close()
        except TransferError as error:
            logger.warning("nixl did not close cleanly: %s", error)
