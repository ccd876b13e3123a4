"""The requests that produce one token per decode step, and what happens when the pool runs short."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from diptych.engine.kv_pool import KVPool
from diptych.engine.request import Request


@dataclass(slots=True)
class ParkedRequest:
    """A retracted request: its KV waits on the host, so it resumes with the same tokens."""

    request: Request
    kv: torch.Tensor
    """[num_pages, num_layers, 2, kv_heads, page_size, head_dim], a copy."""
    since: float
    """`time.monotonic()` when it was parked."""


class RunningBatch:
    """Continuous batching with retraction: the latest arrivals are parked first and resumed oldest first."""

    def __init__(self, pool: KVPool, *, reserved_tokens: int) -> None:
        """`reserved_tokens`: room for that many new tokens per running request is left when admitting."""
        self._pool = pool
        self._reserved_pages = pool.layout.pages_for(reserved_tokens)
        self.running: list[Request] = []
        self.parked: deque[ParkedRequest] = deque()

    def __len__(self) -> int:
        return len(self.running) + len(self.parked)

    def add(self, request: Request) -> None:
        self.running.append(request)

    def keep_free(self, joining: int = 0) -> int:
        """Pages that admission of one more request must leave, with `joining` others about to run."""
        return self._reserved_pages * (len(self.running) + joining)

    def remove(self, request: Request) -> None:
        """Forget a request; pages it still has are the caller's to release, a parked copy is dropped."""
        if request in self.running:
            self.running.remove(request)
            return
        self.parked = deque(entry for entry in self.parked if entry.request is not request)

    def make_room(self) -> tuple[list[Request], list[Request]]:
        """Give every running request the page its next token needs, retracting until that is possible.

        Returns (retracted, too_big): the latter outgrew the whole pool and left the batch with its pages
        still held; the caller fails them.
        """
        too_big = [
            r for r in self.running if self._pages_short(r) and self._needed(r) > self._pool.allocator.total
        ]
        for request in too_big:
            self.running.remove(request)
        retracted: list[Request] = []
        while sum(map(self._pages_short, self.running)) > self._pool.available:
            victim = max(self.running, key=lambda r: r.arrived_at)
            self._retract(victim)
            retracted.append(victim)
        for request in self.running:
            short = self._pages_short(request)
            if short:
                request.add_pages(self._pool.allocate(short, after=request.last_page))
        return retracted, too_big

    def resume(self) -> list[Request]:
        """Bring parked requests back, oldest first, while the pool has room for them."""
        resumed: list[Request] = []
        while self.parked:
            entry = min(self.parked, key=lambda e: e.request.arrived_at)
            needed = self._needed(entry.request)
            if not self._pool.can_allocate(needed + self.keep_free(joining=1 if self.running else 0)):
                break
            self.parked.remove(entry)
            pages = self._pool.allocate(needed)
            self._pool.unpark(entry.kv, pages[: len(entry.kv)])
            entry.request.add_pages(pages)
            self.running.append(entry.request)
            resumed.append(entry.request)
        return resumed

    def _needed(self, request: Request) -> int:
        return self._pool.layout.pages_for(request.num_tokens)

    def _pages_short(self, request: Request) -> int:
        return max(0, self._needed(request) - len(request.pages))

    def _retract(self, request: Request) -> None:
        self.running.remove(request)
        pages = request.take_pages()
        self.parked.append(ParkedRequest(request, self._pool.park(pages), time.monotonic()))
        self._pool.release(pages, request.match)
        request.match = None
