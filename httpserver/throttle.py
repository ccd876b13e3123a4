"""When a line that anybody can cause may be logged: a flood must be seen and must not fill a disk."""

from __future__ import annotations

import time
from collections.abc import Callable

QUIET_SECONDS = 10.0


class Throttle:
    """The first is let through at once, then one every `QUIET_SECONDS` at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_until = float("-inf")
        self._held_back = 0

    def admit(self) -> int | None:
        """How many were held back since the last one that was let through; None holds back this one too."""
        now = self._clock()
        if now < self._silent_until:
            self._held_back += 1
            return None
        self._silent_until = now + QUIET_SECONDS
        held_back, self._held_back = self._held_back, 0
        return held_back
