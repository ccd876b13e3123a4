"""Prefill's side of page transfer: one object per scheduler process."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer.backends.interface import TransferBackend
from diptych.kvtransfer.events import TransferEvent
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.settings import TransferSettings
from diptych.kvtransfer.stats import TransferStats
from diptych.kvtransfer.wire import AuxBlock


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
        """Bind the control socket on `host` (also what is advertised; port 0 picks a free one)."""
        raise NotImplementedError

    @property
    def control_address(self) -> str:
        """`tcp://host:port`, for the bootstrap registration."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """A write is in flight: call `step()` again soon, without waiting for a socket."""
        raise NotImplementedError

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """Sockets and file descriptors whose readability means `step()` has work. Ask before each wait."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """`time.monotonic()` value at which `step()` must run at the latest; None when nothing is waiting."""
        raise NotImplementedError

    def step(self) -> list[TransferEvent]:
        """Read control messages, poll writes, check deadlines. Events: `DestinationReady`, `Sent`,
        `Failed`, `Drained`."""
        raise NotImplementedError

    def open(self, room: int) -> None:
        """The request of this room has arrived. Raises `DuplicateRoom` while the room is active or its
        pages are draining. A destination or a refusal that came earlier shows in the next `step()`."""
        raise NotImplementedError

    def send(self, room: int, src_pages: Sequence[int], first_page_index: int) -> None:
        """Push local pages as the request's pages `first_page_index ..`. Legal before the destination is
        known (the writes then wait for it). Raises `UnknownRoom` when the room has failed or ended, and
        `TransferError` when a page lies outside what decode reserved."""
        raise NotImplementedError

    def finish(self, room: int, aux: AuxBlock) -> None:
        """The last page was sent. Once every write is final decode gets `aux`, and `Sent` follows."""
        raise NotImplementedError

    def abort(self, room: int, reason: str, status: int = 499) -> None:
        """Fail the room here and at decode. `Failed` (and `Drained`) follow from `step()`.
        No effect when the room isn't active."""
        raise NotImplementedError

    def close(self) -> None:
        """Tell peers of active rooms, close sockets and the backend. Idempotent."""
        raise NotImplementedError
