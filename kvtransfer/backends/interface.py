"""What a page-transfer library does for us. A backend moves pages; it knows nothing of rooms or requests.

All calls come from the scheduler's one thread. A backend never blocks it: `connect`, `post_write` and
`poll` return at once; a library that needs driving is driven by a thread of the backend's own, which sleeps
when nothing is in flight or expected. Handles that a backend reports as failed may still be written by the
wire until the peer confirms or is gone; deciding when pages are safe again belongs to the layer above
(quarantine).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec

from diptych.kvtransfer.errors import TransferError

if TYPE_CHECKING:  # a frontend process that serves the bootstrap routes does without
    import torch


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How a peer reaches this process's slab. Sent once per peer, in the handshake."""

    backend: str
    agent: str
    """Fresh for every process start, unique in the cluster."""
    metadata: bytes
    """The library's own blob (NIXL agent metadata, a Mooncake session name)."""
    base_address: int
    page_bytes: int
    num_pages: int


class WriteState(enum.Enum):
    IN_FLIGHT = "in flight"
    DONE = "done"
    """Every byte is in the peer's memory and visible there."""
    FAILED = "failed"


@dataclass(slots=True)
class PageWrite:
    """One posted batch of page copies to one peer. Owned by the backend that made it."""

    peer: str
    num_pages: int
    num_bytes: int
    num_descriptors: int
    """After coalescing runs that are adjacent on both sides."""
    posted_at: float
    """`time.monotonic()`."""
    finished_at: float = 0.0
    """`time.monotonic()` when the state became final."""
    state: WriteState = WriteState.IN_FLIGHT
    error: str = ""
    handle: object = field(default=None, repr=False)


class TransferBackend(ABC):
    name: ClassVar[str]

    @abstractmethod
    def __init__(self, slab: torch.Tensor, *, page_bytes: int, agent: str) -> None:
        """Register the whole slab once. `slab` is contiguous; page i starts at `i * page_bytes`."""

    @abstractmethod
    def endpoint(self) -> Endpoint: ...

    @abstractmethod
    def connect(self, peer: str, endpoint: Endpoint) -> None:
        """Make `peer` a legal destination. Raises `TransferError` when the endpoint doesn't fit this slab;
        what the library finds out later shows as FAILED writes."""

    @abstractmethod
    def post_write(self, peer: str, src_pages: Sequence[int], dst_pages: Sequence[int]) -> PageWrite:
        """Start copying local page `src_pages[i]` onto the peer's page `dst_pages[i]`.

        Raises `TransferError` for an unknown peer or an index outside either slab, before any write.
        A library error becomes a `PageWrite` in state FAILED."""

    @abstractmethod
    def poll(self, write: PageWrite) -> WriteState:
        """Ask once; frees the library's handle when the state is final."""

    @abstractmethod
    def expect_writes(self, expected: bool) -> None:
        """Whether peers may write into this slab now: some libraries need the target's help for that."""

    @abstractmethod
    def fileno(self) -> int | None:
        """A descriptor that becomes readable when a write turns final; None: poll writes in a loop."""

    @abstractmethod
    def clear_wakeup(self) -> None:
        """Make `fileno` unreadable again. Call before `poll`, so that no news is lost."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer; its writes that aren't final are abandoned and become FAILED."""

    @abstractmethod
    def close(self) -> None:
        """Release handles, lists, peers and registrations in the library's order. Idempotent."""


def check_pages(what: str, pages: Sequence[int], num_pages: int) -> None:
    """Raises `TransferError` unless every index is inside a slab of `num_pages`."""
    if pages and (min(pages) < 0 or max(pages) >= num_pages):
        raise TransferError(f"{what} page index outside 0..{num_pages - 1}")


def coalesce(src_pages: Sequence[int], dst_pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs `(src, dst, length)` that are adjacent on both sides, in order."""
    runs: list[tuple[int, int, int]] = []
    for src, dst in zip(src_pages, dst_pages, strict=True):
        if runs:
            first_src, first_dst, length = runs[-1]
            if src == first_src + length and dst == first_dst + length:
                runs[-1] = (first_src, first_dst, length + 1)
                continue
        runs.append((src, dst, 1))
    return runs
