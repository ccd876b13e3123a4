"""Counts connections that ended in an error before a request reached a route, and says so."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable

QUIET_SECONDS = 10.0


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
    """Of one listening socket. Each is counted; the first is logged at once, then one every `QUIET_SECONDS`
    at most, with the number of those between: a flood must be seen and must not fill a disk. What is no HTTP
    is counted alone: probes speak other protocols as a matter of course."""

    def __init__(
        self,
        logger: logging.Logger,
        count: Callable[[Cause], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._count = count
        self._clock = clock
        self._silent_until = float("-inf")
        self._unsaid = 0

    def add(self, cause: Cause, peer: str, message: str) -> None:
        self._count(cause)
        if cause is Cause.MALFORMED:
            return
        now = self._clock()
        if now < self._silent_until:
            self._unsaid += 1
            return
        earlier = f" (and {self._unsaid} others since the last such line)" if self._unsaid else ""
        self._logger.warning("refused a connection from %s%s: %s", peer, earlier, message)
        self._silent_until = now + QUIET_SECONDS
        self._unsaid = 0
