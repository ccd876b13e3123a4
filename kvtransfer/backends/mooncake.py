"""Page transfer over Mooncake's transfer engine.

The engine moves bytes in threads of its own, which sleep when nothing is in flight; the target needs to do
nothing. `kvtransfer/backends/mooncake_owner.py` is the thread that drives it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import torch

from diptych.engine.background import Wakeup
from diptych.kvtransfer.backends.interface import (
    Endpoint,
    PageWrite,
    TransferBackend,
    WriteState,
    check_endpoint,
    coalesce,
    new_write,
)
from diptych.kvtransfer.backends.mooncake_engine import MooncakeEngine, Session
from diptych.kvtransfer.backends.mooncake_library import MooncakeSettings
from diptych.kvtransfer.backends.mooncake_owner import MooncakeOwner
from diptych.kvtransfer.errors import TransferError

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0


class MooncakeBackend(TransferBackend):
    name: ClassVar[str] = "mooncake"

    def __init__(
        self, slab: torch.Tensor, *, page_bytes: int, agent: str, settings: MooncakeSettings
    ) -> None:
        """Raises `TransferError` when Mooncake can't be loaded or started, or refuses the memory."""
        self._slab = slab
        """Kept alive: the library holds its address."""
        engine = MooncakeEngine(slab, page_bytes=page_bytes, agent=agent, settings=settings)
        self._session = engine.session
        self._endpoint = engine.endpoint
        self._peers: dict[str, int] = {}
        """Peer → pages of its slab, as the scheduler's thread knows it."""
        self._wakeup = Wakeup()
        self._owner = MooncakeOwner(engine, self._wakeup)
        self._owner.start()
        logger.info(
            "mooncake agent %s: %d pages, over %s at %s",
            agent, self._endpoint.num_pages, self._session.protocol, self._session.name,
        )  # fmt: skip

    def endpoint(self) -> Endpoint:
        return self._endpoint

    def connect(self, peer: str, endpoint: Endpoint) -> None:
        check_endpoint(endpoint, backend=self.name, page_bytes=self._endpoint.page_bytes)
        try:
            session = msgspec.msgpack.decode(endpoint.metadata, type=Session)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransferError(f"the peer's Mooncake session is unreadable: {error}") from error
        host, _, port = session.name.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise TransferError(f"the peer's Mooncake session {session.name!r} is not host:port")
        if session.protocol != self._session.protocol:
            raise TransferError(
                f"mooncake protocol: {self._session.protocol} here, {session.protocol} at the peer"
            )
        self._peers[peer] = endpoint.num_pages
        self._owner.do(lambda: self._owner.connect(peer, endpoint, host, port))

    def post_write(self, peer: str, src_pages: Sequence[int], dst_pages: Sequence[int]) -> PageWrite:
        write = new_write(
            peer,
            src_pages,
            dst_pages,
            page_bytes=self._endpoint.page_bytes,
            num_pages=self._endpoint.num_pages,
            peer_pages=self._peers.get(peer),
        )
        runs = coalesce(src_pages, dst_pages)
        self._owner.do(lambda: self._owner.post(write, runs))
        return write

    def poll(self, write: PageWrite) -> WriteState:
        if write.state is WriteState.IN_FLIGHT and not self._owner.is_alive():
            raise TransferError("the thread that drives mooncake has died")
        return write.state

    def expect_writes(self, expected: bool) -> None:
        """The library's own threads serve peers whenever they write."""

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
            logger.error("mooncake did not shut down within %g s", _CLOSE_TIMEOUT_S)
            return
        self._wakeup.close()
