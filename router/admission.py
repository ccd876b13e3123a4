"""How many requests the router relays at once, and who waits for a turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from diptych.router.errors import RouterError


class QueueMetrics(Protocol):
    """What admission reports."""

    def turned_away(self, cause: str) -> None: ...

    def waited(self, seconds: float) -> None: ...


class Admission:
    """First come, first served: `limit` requests at once (None: any number), `queue_size` more wait for at
    most `queue_timeout` seconds. A client that leaves while it waits gives its place up at once."""

    def __init__(
        self, limit: int | None, queue_size: int, queue_timeout: float, metrics: QueueMetrics
    ) -> None:
        self._limit = limit
        self._queue_size = queue_size
        self._queue_timeout = queue_timeout
        self._metrics = metrics
        self._running = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Held while a request runs. To enter raises RouterError: 429 when the queue is full or the wait too
        long, 503 once the router shuts down."""
        return contextlib.nullcontext() if self._limit is None else self._turn()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        assert self._limit is not None
        if self._running < self._limit:  # then nobody waits: a turn that ends goes to who is first
            self._running += 1
        else:
            await self._wait()
        try:
            yield
        finally:
            self._pass_on()

    def close(self) -> None:
        """Turn away all who wait."""
        for waiter in self._queue:
            if not waiter.done():
                waiter.set_exception(RouterError(503, "the router is shutting down", retry_after=1))

    async def _wait(self) -> None:
        if len(self._queue) >= self._queue_size:
            self._metrics.turned_away("full")
            raise RouterError(
                429,
                f"{self._limit} requests are running and {len(self._queue)} wait (--max-concurrent-requests, "
                "--queue-size)",
                code="rate_limit_exceeded",
                retry_after=1,
            )
        loop = asyncio.get_running_loop()
        started = loop.time()
        waiter: asyncio.Future[None] = loop.create_future()
        self._queue.append(waiter)
        admitted = False
        try:
            async with asyncio.timeout(self._queue_timeout):
                await waiter
            admitted = True
        except TimeoutError:
            self._metrics.turned_away("timeout")
            raise RouterError(
                429,
                f"no turn within {self._queue_timeout:g} s (--queue-timeout)",
                code="rate_limit_exceeded",
                retry_after=1,
            ) from None
        finally:
            if waiter in self._queue:
                self._queue.remove(waiter)
            elif not admitted:
                self._pass_on()  # the turn came in the same moment as the end of the wait
            self._metrics.waited(loop.time() - started)

    def _pass_on(self) -> None:
        """A turn is over: it goes to the first who still waits."""
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._running -= 1
