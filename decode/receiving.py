"""How much of decode's pool and batch one prefill worker may hold without having delivered anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class ReceivingLimits:
    """A prefill worker that is stuck, or has a long queue, keeps what is reserved for it empty: beyond its
    share its requests wait without pages, and those of other prefill workers go on.

    Pages count until they are safe to use otherwise: delivered, or out of quarantine. So a worker that lets
    one request after the other run into its deadline can't collect the pool in quarantine either.
    """

    def __init__(self, *, max_pages: int, max_requests: int) -> None:
        """Both for one prefill worker. A worker that has nothing is always allowed one request."""
        self._max_pages = max_pages
        self._max_requests = max(1, max_requests)
        self._pages: Counter[Hashable] = Counter()
        self._requests: Counter[Hashable] = Counter()
        self.num_requests = 0
        """Being received now, from all workers."""

    def allows(self, worker: Hashable, num_pages: int) -> bool:
        pages = self._pages[worker]
        fits = pages == 0 or pages + num_pages <= self._max_pages
        return fits and self._requests[worker] < self._max_requests

    def started(self, worker: Hashable, num_pages: int) -> None:
        """Pages were reserved for a request."""
        self._requests[worker] += 1
        self.num_requests += 1
        self._pages[worker] += num_pages

    def ended(self, worker: Hashable) -> None:
        """The request is received, or has failed; its pages still count until `safe`."""
        self.num_requests -= 1
        self._requests[worker] -= 1
        if not self._requests[worker]:
            del self._requests[worker]

    def safe(self, worker: Hashable, num_pages: int) -> None:
        """Pages hold what they were reserved for, or can't be written any more."""
        self._pages[worker] -= num_pages
        if not self._pages[worker]:
            del self._pages[worker]
