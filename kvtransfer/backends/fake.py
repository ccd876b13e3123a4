"""A backend whose pages travel inside one process, with transfers that finish when a test says so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from diptych.kvtransfer.backends.interface import (
    Endpoint,
    PageWrite,
    TransferBackend,
    WriteState,
    check_endpoint,
    new_write,
)


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Page `src_pages[i]` of `source`, agent `origin`'s slab, onto page `dst_pages[i]` of agent `target`."""

    origin: str
    target: str
    source: torch.Tensor
    src_pages: list[int]
    dst_pages: list[int]


class FakeFabric:
    """What joins the fake backends of one process. `stalled` holds new writes back until `complete` or
    `fail`; otherwise a write is done when it is first polled."""

    def __init__(self) -> None:
        self.slabs: dict[str, torch.Tensor] = {}
        """Agent → [num_pages, page_bytes] uint8 view."""
        self.stalled = False
        self.in_flight: list[PageWrite] = []

    def complete(self, write: PageWrite) -> None:
        """The bytes arrive."""
        if self.copy_of(write).target not in self.slabs:
            self.fail(write, "the peer's slab is gone")
            return
        self.land(write)
        self._end(write, WriteState.DONE)

    def land(self, write: PageWrite) -> None:
        """The bytes arrive, whatever was reported: those of a failed write still may."""
        copy = self.copy_of(write)
        self.slabs[copy.target][copy.dst_pages] = copy.source[copy.src_pages]

    def fail(self, write: PageWrite, error: str) -> None:
        write.error = error
        self._end(write, WriteState.FAILED)

    @staticmethod
    def copy_of(write: PageWrite) -> PageCopy:
        """What a write does."""
        assert isinstance(write.handle, PageCopy)
        return write.handle

    def _end(self, write: PageWrite, state: WriteState) -> None:
        write.state = state
        write.finished_at = time.monotonic()
        self.in_flight.remove(write)


class FakeBackend(TransferBackend):
    name: ClassVar[str] = "fake"

    def __init__(self, slab: torch.Tensor, *, page_bytes: int, agent: str, fabric: FakeFabric) -> None:
        self._agent = agent
        self._fabric = fabric
        self._page_bytes = page_bytes
        self._pages = slab.flatten().view(torch.uint8).view(-1, page_bytes)
        self._peers: dict[str, Endpoint] = {}
        self.expecting = False
        fabric.slabs[agent] = self._pages

    def endpoint(self) -> Endpoint:
        return Endpoint(
            backend=self.name,
            agent=self._agent,
            metadata=b"",
            base_address=self._pages.data_ptr(),
            page_bytes=self._page_bytes,
            num_pages=len(self._pages),
        )

    def connect(self, peer: str, endpoint: Endpoint) -> None:
        check_endpoint(endpoint, backend=self.name, page_bytes=self._page_bytes)
        self._peers[peer] = endpoint

    def post_write(self, peer: str, src_pages: Sequence[int], dst_pages: Sequence[int]) -> PageWrite:
        endpoint = self._peers.get(peer)
        write = new_write(
            peer,
            src_pages,
            dst_pages,
            page_bytes=self._page_bytes,
            num_pages=len(self._pages),
            peer_pages=None if endpoint is None else endpoint.num_pages,
        )
        assert endpoint is not None
        write.handle = PageCopy(self._agent, endpoint.agent, self._pages, list(src_pages), list(dst_pages))
        self._fabric.in_flight.append(write)
        return write

    def poll(self, write: PageWrite) -> WriteState:
        if write.state is WriteState.IN_FLIGHT and not self._fabric.stalled:
            self._fabric.complete(write)
        return write.state

    def expect_writes(self, expected: bool) -> None:
        self.expecting = expected

    def fileno(self) -> int | None:
        return None

    def clear_wakeup(self) -> None:
        return

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)
        mine = [w for w in self._fabric.in_flight if self._fabric.copy_of(w).origin == self._agent]
        for write in [w for w in mine if w.peer == peer]:
            self._fabric.fail(write, "the peer was disconnected")

    def close(self) -> None:
        self._fabric.slabs.pop(self._agent, None)
