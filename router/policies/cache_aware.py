"""Prompts go where their beginning was computed before, unless that overloads a worker.

A request goes to a worker that has seen `--cache-threshold` of its prompt, to the least loaded of those that
have seen about as much. Every other request goes to the least loaded worker, which then has seen it. A
worker that is busier than the others by both `--balance-abs-threshold` and `--balance-rel-threshold` is
passed over, and by that a second worker comes to know a beginning that many share: from then on both serve
it.

Busier means requests in flight now, or work of late. The second counts even where queues are short, since a
hot beginning would otherwise stay on one worker until that one's queue is long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from diptych.router.call import Call
from diptych.router.policies.prefix_tree import PrefixTree
from diptych.router.policies.prompt_key import prompt_key
from diptych.router.workers import Worker

MIN_MATCH_BYTES = 64
"""Less than about a page of tokens: nothing that a worker could have cached."""

ABOUT_AS_MUCH = 0.9
"""Share of the longest match from which on another worker will do as well."""

SEEN_COST = 0.1
"""What a cached byte of a prompt costs, where one that isn't costs 1: its pages are attended to, and sent to
the decode worker."""

REQUEST_COST = 64.0
"""What a request costs whatever its length, in bytes of prompt."""

WINDOW = 100
"""Requests per worker after which a request's share in the work of late has faded to a third."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheAwareSettings:
    """The leaves of the `router` namespace with these names."""

    cache_threshold: float
    balance_abs_threshold: int
    balance_rel_threshold: float
    max_tree_size: int


class CacheAware:
    """For the side that computes prompts."""

    def __init__(self, settings: CacheAwareSettings) -> None:
        self._settings = settings
        self._tree = PrefixTree(settings.max_tree_size)
        self._recent: dict[Worker, float] = {}
        """Work given to each worker of late, in bytes of prompt to compute."""
        self._requests = 0.0
        """How many requests that was, all workers together."""

    def added(self, worker: Worker) -> None:
        # As if it had done as much as the others: a worker that starts at nothing would get every request
        # until it had caught up with a past that is over.
        known = self._recent.values()
        self._recent[worker] = sum(known) / len(known) if known else 0.0

    def removed(self, worker: Worker) -> None:
        del self._recent[worker]
        self._tree.remove(worker)

    def pick(self, candidates: Sequence[Worker], call: Call) -> Worker:
        key = prompt_key(call)
        seen = self._tree.match(key)
        chosen = self._choose(candidates, seen, len(key))
        self._tree.insert(key, chosen)
        self._account(chosen, len(key), seen.get(chosen, 0))
        return chosen

    def _choose(self, candidates: Sequence[Worker], seen: dict[Worker, int], length: int) -> Worker:
        longest = max(seen.get(worker, 0) for worker in candidates)
        if longest < max(MIN_MATCH_BYTES, self._settings.cache_threshold * length):
            return min(candidates, key=self._burden)
        familiar = [w for w in candidates if seen.get(w, 0) >= ABOUT_AS_MUCH * longest]
        return self._unless_overloaded(min(familiar, key=self._burden), candidates)

    def _burden(self, worker: Worker) -> tuple[tuple[int, int], float]:
        return worker.load, self._recent[worker]

    def _unless_overloaded(self, preferred: Worker, candidates: Sequence[Worker]) -> Worker:
        """`preferred`, or a worker that is less busy by both thresholds."""
        most, ratio = self._settings.balance_abs_threshold, self._settings.balance_rel_threshold
        idlest = min(candidates, key=self._burden)
        if preferred.in_flight > max(idlest.in_flight + most, idlest.in_flight * ratio):
            return idlest
        mean = sum(self._recent[w] for w in candidates) / len(candidates)
        usual = sum(self._recent.values()) / max(self._requests, 1.0)
        if self._recent[preferred] > max(mean + most * usual, mean * ratio):
            # Not to one whose queue is longer, though, because of what it did before.
            able = [w for w in candidates if w.in_flight <= preferred.in_flight + most]
            return min(able, key=lambda w: self._recent[w])
        return preferred

    def _account(self, worker: Worker, length: int, seen: int) -> None:
        fading = 1 - 1 / (WINDOW * len(self._recent))
        for known in self._recent:
            self._recent[known] *= fading
        self._requests = self._requests * fading + 1
        self._recent[worker] += REQUEST_COST + (length - seen) + SEEN_COST * seen
