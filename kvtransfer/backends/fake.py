"""A backend whose pages travel inside one process, with transfers that finish when a test says so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

import torch

from diptych.kvtransfer.backends.interface import (
    Endpoint,
    PageWrite,
    TransferBackend,
    WriteState,
    check_pages,
    coalesce,
)
from diptych.kvtransfer.errors import TransferError


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
        job = write.handle
        assert isinstance(job, _Copy)
        target = self.slabs.get(job.agent)
        if target is None:
            self.fail(write, "the peer's slab is gone")
            return
        target[job.dst_pages] = job.source[job.src_pages]
        self._end(write, WriteState.DONE)

    def fail(self, write: PageWrite, error: str) -> None:
        write.error = error
        self._end(write, WriteState.FAILED)

    def _end(self, write: PageWrite, state: WriteState) -> None:
        write.state = state
        write.finished_at = time.monotonic()
        self.in_flight.remove(write)


class _Copy:
    def __init__(
        self, agent: str, source: torch.Tensor, src_pages: Sequence[int], dst_pages: Sequence[int]
    ) -> None:
        self.agent = agent
        self.source = source
        self.src_pages = list(src_pages)
        self.dst_pages = list(dst_pages)


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
        if endpoint.backend != self.name or endpoint.page_bytes != self._page_bytes:
            raise TransferError("the peer's endpoint does not fit this slab")
        self._peers[peer] = endpoint

    def post_write(self, peer: str, src_pages: Sequence[int], dst_pages: Sequence[int]) -> PageWrite:
        endpoint = self._peers.get(peer)
        if endpoint is None:
            raise TransferError(f"unknown peer {peer}")
        check_pages("source", src_pages, len(self._pages))
        check_pages("destination", dst_pages, endpoint.num_pages)
        write = PageWrite(
            peer=peer,
            num_pages=len(src_pages),
            num_bytes=len(src_pages) * self._page_bytes,
            num_descriptors=len(coalesce(src_pages, dst_pages)),
            posted_at=time.monotonic(),
            handle=_Copy(endpoint.agent, self._pages, src_pages, dst_pages),
        )
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
        for write in [w for w in self._fabric.in_flight if w.peer == peer]:
            self._fabric.fail(write, "the peer was disconnected")

    def close(self) -> None:
        self._fabric.slabs.pop(self._agent, None)
