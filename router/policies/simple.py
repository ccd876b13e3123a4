"""Policies that look at the workers alone, not at the request."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from diptych.router.call import Call
from diptych.router.policies.base import Stateless
from diptych.router.workers import Worker


class RoundRobin(Stateless):
    """Each worker in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, candidates: Sequence[Worker], call: Call) -> Worker:
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        return chosen


class Random(Stateless):
    """Each worker with equal probability."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or random.Random()

    def pick(self, candidates: Sequence[Worker], call: Call) -> Worker:
        return self._source.choice(candidates)


class PowerOfTwo(Stateless):
    """The less loaded of two drawn at random (Mitzenmacher, "The Power of Two Choices in Randomized Load
    Balancing"): nearly as even as the least loaded of all, and several routers that don't know of each
    other don't all run to the same worker."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or random.Random()

    def pick(self, candidates: Sequence[Worker], call: Call) -> Worker:
        if len(candidates) == 1:
            return candidates[0]
        return min(self._source.sample(candidates, 2), key=lambda w: w.load)


class LeastLoaded:
    """The one with the least in flight; of those, the one whose last turn is longest ago."""

    def __init__(self) -> None:
        self._turns = itertools.count(1)
        self._last_turn: dict[Worker, int] = {}

    def pick(self, candidates: Sequence[Worker], call: Call) -> Worker:
        chosen = min(candidates, key=lambda w: (w.load, self._last_turn[w]))
        self._last_turn[chosen] = next(self._turns)
        return chosen

    def added(self, worker: Worker) -> None:
        self._last_turn[worker] = 0

    def removed(self, worker: Worker) -> None:
        del self._last_turn[worker]
