"""Counts connections that ended in an error before a request reached a route, and says so."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable

from diptych.httpserver.throttle import Throttle


class Cause(enum.StrEnum):
    TOO_MANY = "too_many"
    """More connections than `--http-max-connections`."""
    SLOW_HEAD = "slow_head"
    """The head of a request took longer than `--http-receive-timeout`."""
    LONG_HEAD = "long_head"
    """A line of the head is too long."""
    MALFORMED = "malformed"
    """It was no HTTP."""


class Refusals:
    """Of one listening socket. Each is counted, and some are logged, with the number of those between. What
    is no HTTP is counted alone: probes speak other protocols as a matter of course."""

    def __init__(
        self,
        logger: logging.Logger,
        count: Callable[[Cause], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._count = count
        self._throttle = Throttle(clock)

    def add(self, cause: Cause, peer: str, message: str) -> None:
        self._count(cause)
        if cause is Cause.MALFORMED:
            return
        unsaid = self._throttle.admit()
        if unsaid is None:
            return
        earlier = f" (and {unsaid} others since the last such line)" if unsaid else ""
        self._logger.warning("refused a connection from %s%s: %s", peer, earlier, message)
