"""Notices that nothing comes from a worker for too long, for the price of an assignment per chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LAST_CHANCE = 0.05
"""Seconds between the end of a wait and the verdict: when the router itself was held up, what has come in
meanwhile is read first."""


class SilenceWatch:
    """Calls `on_silence` once when a wait has lasted `limit` seconds. Only waits count: while a slow client
    is written to, nobody asks whether the worker has more."""

    def __init__(self, limit: float, on_silence: Callable[[], None]) -> None:
        self._limit = limit
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._last_chance_for: float | None = None
        self._timer = self._loop.call_later(limit, self._check)

    def waiting(self) -> None:
        self._since = self._loop.time()

    def heard(self) -> None:
        self._since = None

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        waited = 0.0 if self._since is None else self._loop.time() - self._since
        if waited >= self._limit and self._last_chance_for == self._since:
            self._on_silence()
        elif waited >= self._limit:
            self._last_chance_for = self._since
            self._timer = self._loop.call_later(LAST_CHANCE, self._check)
        else:
            self._timer = self._loop.call_later(self._limit - waited, self._check)
