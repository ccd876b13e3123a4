"""What a policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from diptych.router.call import Call
from diptych.router.workers import Worker


class Policy(Protocol):
    """Chooses among the workers of one side; each side has an instance of its own. It is told of every worker
    of its side before the worker is a candidate, and once it never will be again."""

    def pick(self, candidates: Sequence[Worker], call: Call) -> Worker:
        """One of `candidates` (never empty)."""
        ...

    def added(self, worker: Worker) -> None: ...

    def removed(self, worker: Worker) -> None: ...


class Stateless:
    """For policies that keep nothing per worker."""

    def added(self, worker: Worker) -> None:
        pass

    def removed(self, worker: Worker) -> None:
        pass
