"""A circuit breaker: a worker that fails request after request gets none for a while, then one to try.

| state | requests | may move to |
|---|---|---|
| `closed` | all | `open` after `--breaker-failures` failures in a row |
| `open` | none; once `--breaker-cooldown` is over, one | `half_open` when that one goes out; `closed` |
| `half_open` | none beside the one | `closed` if it succeeds; `open` if it fails or says nothing |

It is apart from health: a worker may answer every health check and fail every request. A worker that comes up
again after it was down begins anew, since whatever failed has most likely been restarted.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable

from diptych.common_config import get_router

logger = logging.getLogger(__name__)


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


LEGAL_MOVES = {
    BreakerState.CLOSED: {BreakerState.OPEN},
    BreakerState.OPEN: {BreakerState.HALF_OPEN, BreakerState.CLOSED},
    BreakerState.HALF_OPEN: {BreakerState.CLOSED, BreakerState.OPEN},
}


class CircuitBreaker:
    """Of one worker, `name` in the log. Each request calls `began`, at most one of `succeeded` and `failed`,
    and `ended`, in this order.

    A success also closes an open breaker: requests that were under way, and those sent for lack of another
    worker, prove as much as one that was sent to try.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._opened_at = 0.0
        self._failures = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def passes(self) -> bool:
        """Whether the worker may be given a request now."""
        match self._state:
            case BreakerState.CLOSED:
                return True
            case BreakerState.OPEN:
                return self._cooled_down
            case BreakerState.HALF_OPEN:
                return False

    def began(self) -> bool:
        """A request goes out. True if it is the one that tries the worker: pass that on to `ended`."""
        if self._state is BreakerState.OPEN and self._cooled_down:
            self._move(BreakerState.HALF_OPEN)
            return True
        return False

    def succeeded(self) -> None:
        self._failures = 0
        if self._state is not BreakerState.CLOSED:
            self._move(BreakerState.CLOSED)
            logger.info("%s works again: its circuit breaker is closed", self._name)

    def failed(self) -> None:
        """The worker provably, or possibly, failed the request."""
        limit = get_router().breaker_failures
        self._failures += 1
        if limit == -1 or (self._state is BreakerState.CLOSED and self._failures < limit):
            return
        if self._state is BreakerState.CLOSED:
            logger.warning("%s failed %d requests in a row: its circuit breaker is open", self._name, limit)
        if self._state is not BreakerState.OPEN:
            self._move(BreakerState.OPEN)
        self._opened_at = self._clock()

    def ended(self, trial: bool) -> None:
        """The request is over. A trial that neither succeeded nor failed lets the next request be one."""
        if trial and self._state is BreakerState.HALF_OPEN:
            self._move(BreakerState.OPEN)

    def recovered(self) -> None:
        """The worker was down and is up."""
        self._failures = 0
        if self._state is not BreakerState.CLOSED:
            self._move(BreakerState.CLOSED)

    @property
    def _cooled_down(self) -> bool:
        return self._clock() - self._opened_at >= get_router().breaker_cooldown

    def _move(self, state: BreakerState) -> None:
        assert state in LEGAL_MOVES[self._state], f"{self._name}: {self._state} to {state}"
        self._state = state
