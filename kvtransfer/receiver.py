"""Decode's side of page transfer: one object per scheduler process."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer.backends.interface import TransferBackend
from diptych.kvtransfer.events import TransferEvent
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.settings import TransferSettings
from diptych.kvtransfer.stats import TransferStats


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
        """Bind the control socket on `host` (also what is advertised; port 0 picks a free one)."""
        raise NotImplementedError

    @property
    def control_address(self) -> str:
        """`tcp://host:port`."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """The transfer library needs `step()` soon, without waiting for a socket."""
        raise NotImplementedError

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """Sockets and file descriptors whose readability means `step()` has work. Ask before each wait."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """`time.monotonic()` value at which `step()` must run at the latest; None when nothing is waiting."""
        raise NotImplementedError

    def step(self) -> list[TransferEvent]:
        """Read control messages and look-ups, check deadlines. Events: `HandshakeDone`, `Received`,
        `Failed`, `Drained`."""
        raise NotImplementedError

    def open(self, room: int, host: str, port: int) -> None:
        """Start the handshake with the prefill worker whose bootstrap service is at `host:port`.
        Raises `DuplicateRoom` while the room is active or its pages are quarantined."""
        raise NotImplementedError

    def reserve(
        self, room: int, pages: Sequence[int], num_prompt_tokens: int, first_page_index: int = 0
    ) -> None:
        """After `HandshakeDone`: prefill may now write the request's pages `first_page_index ..` onto
        `pages` of the local slab. Raises `UnknownRoom` when the room has failed meanwhile."""
        raise NotImplementedError

    def abort(self, room: int, reason: str, status: int = 499) -> None:
        """Fail the room here and at prefill. `Failed` (and `Drained`) follow from `step()`.
        No effect when the room isn't active."""
        raise NotImplementedError

    def close(self) -> None:
        """Tell peers of active rooms, close sockets and the backend. Idempotent."""
        raise NotImplementedError
