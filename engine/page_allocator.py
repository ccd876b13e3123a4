"""Who owns each page of the slab.

Every page is in exactly one state, and the counts always add up:
`free + held + cached + quarantined == total`. A *held* page belongs to one request, a *cached* page to the
prefix cache (running requests may read it), a *quarantined* page to nobody: a remote write may still land
in it, so it must not be given out.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np


class PageState(enum.IntEnum):
    FREE = 0
    HELD = 1
    CACHED = 2
    QUARANTINED = 3


class OutOfPages(Exception):
    """The pool has fewer free pages than asked for. Callers ask `can_allocate` first."""


class PageAllocator:
    """Hands out page numbers in runs that are as contiguous as possible, because a run of adjacent pages
    is one transfer descriptor."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {num_pages}")
        self.total = num_pages
        self._state = np.zeros(num_pages, dtype=np.int8)
        self._counts = {state: 0 for state in PageState}
        self._counts[PageState.FREE] = num_pages

    @property
    def free(self) -> int:
        return self._counts[PageState.FREE]

    @property
    def held(self) -> int:
        return self._counts[PageState.HELD]

    @property
    def cached(self) -> int:
        return self._counts[PageState.CACHED]

    @property
    def quarantined(self) -> int:
        return self._counts[PageState.QUARANTINED]

    def can_allocate(self, n: int) -> bool:
        return n <= self.free

    def allocate(self, n: int, *, after: int | None = None) -> list[int]:
        """`n` free pages, now held. `after`: the caller's last page, to extend its run if possible.

        Raises `OutOfPages`; then nothing was taken.
        """
        if n > self.free:
            raise OutOfPages(f"{n} pages asked for, {self.free} free of {self.total}")
        if n == 0:
            return []
        if after is not None and self._run_is_free(after + 1, n):
            pages = list(range(after + 1, after + 1 + n))
        else:
            pages = self._best_runs(n)
        self._move(pages, PageState.FREE, PageState.HELD)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Held pages become free."""
        self._move(pages, PageState.HELD, PageState.FREE)

    def give_to_cache(self, pages: Sequence[int]) -> None:
        """Held pages become the prefix cache's."""
        self._move(pages, PageState.HELD, PageState.CACHED)

    def evicted(self, pages: Sequence[int]) -> None:
        """Cached pages, which the prefix cache has let go, become free."""
        self._move(pages, PageState.CACHED, PageState.FREE)

    def quarantine(self, pages: Sequence[int]) -> None:
        """Held pages that a remote write may still touch."""
        self._move(pages, PageState.HELD, PageState.QUARANTINED)

    def end_quarantine(self, pages: Sequence[int]) -> None:
        """No write can touch these pages any more: they become free."""
        self._move(pages, PageState.QUARANTINED, PageState.FREE)

    def held_among(self, pages: Sequence[int]) -> list[int]:
        """Those of `pages` that are held, in order."""
        index = np.asarray(pages, dtype=np.int64)
        return [int(page) for page in index[self._state[index] == PageState.HELD]]

    def check(self) -> None:
        """Raises AssertionError when the counts don't match the pages."""
        for state in PageState:
            counted = int(np.count_nonzero(self._state == state))
            assert counted == self._counts[state], (
                f"{state.name}: {counted} pages, count {self._counts[state]}"
            )
        assert sum(self._counts.values()) == self.total

    def _run_is_free(self, start: int, n: int) -> bool:
        return start + n <= self.total and not self._state[start : start + n].any()

    def _best_runs(self, n: int) -> list[int]:
        """The smallest free run that holds all `n`; else the largest runs, in address order."""
        is_free = np.concatenate(([False], self._state == PageState.FREE, [False]))
        edges = np.flatnonzero(is_free[1:] != is_free[:-1])
        starts, ends = edges[0::2], edges[1::2]
        lengths = ends - starts
        fits = np.flatnonzero(lengths >= n)
        if len(fits):
            start = int(starts[fits[np.argmin(lengths[fits])]])
            return list(range(start, start + n))
        taken: list[tuple[int, int]] = []
        missing = n
        for i in np.argsort(-lengths, kind="stable"):
            take = min(int(lengths[i]), missing)
            taken.append((int(starts[i]), take))
            missing -= take
            if not missing:
                break
        return [page for start, take in sorted(taken) for page in range(start, start + take)]

    def _move(self, pages: Sequence[int], old: PageState, new: PageState) -> None:
        if not pages:
            return
        index = np.asarray(pages, dtype=np.int64)
        wrong = index[self._state[index] != old]
        assert not len(wrong), f"pages {wrong[:8].tolist()} are not {old.name}"
        assert len(np.unique(index)) == len(index), "a page is listed twice"
        self._state[index] = new
        self._counts[old] -= len(pages)
        self._counts[new] += len(pages)
