"""Which prefill and which decode worker serve a request."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from diptych.router.call import Call
from diptych.router.errors import RouterError
from diptych.router.registry import WorkerRegistry
from diptych.router.workers import Worker, WorkerRole


class Policy(Protocol):
    """Chooses among the healthy workers of one side. Each side has an instance of its own."""

    def pick(self, candidates: Sequence[Worker], call: Call) -> Worker:
        """One of `candidates` (never empty)."""
        ...


class RoundRobin:
    """Each worker in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, candidates: Sequence[Worker], call: Call) -> Worker:
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        return chosen


class Random:
    """Each worker with equal probability."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or random.Random()

    def pick(self, candidates: Sequence[Worker], call: Call) -> Worker:
        return self._source.choice(candidates)


POLICIES: dict[str, Callable[[], Policy]] = {"round_robin": RoundRobin, "random": Random}


@dataclasses.dataclass(frozen=True)
class Pair:
    prefill: Worker
    decode: Worker


class Pairing:
    """Joins a policy per side with the registry's view of who is healthy."""

    def __init__(self, registry: WorkerRegistry, prefill_policy: Policy, decode_policy: Policy) -> None:
        self._registry = registry
        self._policies = {WorkerRole.PREFILL: prefill_policy, WorkerRole.DECODE: decode_policy}

    def pick(self, call: Call, avoid: Collection[Worker] = ()) -> Pair:
        """A pair for one attempt; workers in `avoid` only when a side has no other.

        Raises RouterError (503) when a side has no healthy worker.
        """
        if not self._registry.has_pair:
            raise RouterError(
                503, f"the request can't be served now: {self._registry.missing()}", retry_after=1
            )
        return Pair(
            prefill=self._pick(WorkerRole.PREFILL, call, avoid),
            decode=self._pick(WorkerRole.DECODE, call, avoid),
        )

    def _pick(self, role: WorkerRole, call: Call, avoid: Collection[Worker]) -> Worker:
        healthy = self._registry.healthy(role)
        fresh = [w for w in healthy if w not in avoid]
        return self._policies[role].pick(fresh or healthy, call)
