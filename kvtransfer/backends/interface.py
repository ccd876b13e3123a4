"""What a page-transfer library does for us. A backend moves pages; it knows nothing of rooms or requests.

All calls come from the scheduler's one thread. A backend never blocks it: `connect`, `post_write` and
`poll` return at once; a library that needs driving is driven by a thread of the backend's own, which sleeps
when nothing is in flight or expected.

A write that is DONE is in the peer's memory: the layer above may then tell the peer so over the control
channel, and needs no notification of the library's own. A write that FAILED is over on this side, yet bytes
of it may still be on the wire or in the peer's socket buffers: deciding when the peer's pages are safe again
belongs to the layer above (quarantine).
"""

from __future__ import annotations

import enum
import time
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


_MAX_ADDRESS = 1 << 57
_MAX_PAGES = 1 << 24
"""More than any machine's memory holds of the smallest pages in use. A library may take memory for each page
that a peer claims to have."""


def check_endpoint(endpoint: Endpoint, *, backend: str, page_bytes: int) -> None:
    """Raises `TransferError` unless pages of this worker can be written into that slab."""
    if endpoint.backend != backend:
        raise TransferError(f"transfer backend: {backend} here, {endpoint.backend} at the peer")
    if endpoint.page_bytes != page_bytes:
        raise TransferError(f"page bytes: {page_bytes} here, {endpoint.page_bytes} at the peer")
    if not 1 <= endpoint.num_pages <= _MAX_PAGES:
        raise TransferError(f"the peer's slab of {endpoint.num_pages} pages is not one of 1 to {_MAX_PAGES}")
    end = endpoint.base_address + endpoint.num_pages * endpoint.page_bytes
    if endpoint.base_address < 0 or end > _MAX_ADDRESS:
        raise TransferError("the peer's slab is at an impossible address")


def new_write(
    peer: str,
    src_pages: Sequence[int],
    dst_pages: Sequence[int],
    *,
    page_bytes: int,
    num_pages: int,
    peer_pages: int | None,
) -> PageWrite:
    """A write to post, with its counts. `num_pages`, `peer_pages`: of this slab and the peer's; None for a
    peer that isn't connected. Raises `TransferError` as `post_write` does."""
    if peer_pages is None:
        raise TransferError(f"unknown peer {peer}")
    if len(src_pages) != len(dst_pages):
        raise TransferError(f"{len(src_pages)} source pages for {len(dst_pages)} destination pages")
    check_pages("source", src_pages, num_pages)
    check_pages("destination", dst_pages, peer_pages)
    return PageWrite(
        peer=peer,
        num_pages=len(src_pages),
        num_bytes=len(src_pages) * page_bytes,
        num_descriptors=len(coalesce(src_pages, dst_pages)),
        posted_at=time.monotonic(),
    )


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
