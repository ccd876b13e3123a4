"""HTTP requests that run beside a test: waited for, asserted on, or left."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Self

from support.client import Client


class Answer:
    """Of one HTTP request that is under way."""

    def __init__(self, future: Future[tuple[int, Any]]) -> None:
        self._future = future
        self.ended_at: float | None = None
        """`time.monotonic()`."""
        future.add_done_callback(self._ended)

    def _ended(self, _: Future[tuple[int, Any]]) -> None:
        self.ended_at = time.monotonic()

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self, seconds: float) -> tuple[int, Any]:
        """Status and body. Raises `TimeoutError`, and `aiohttp.ClientError` for a connection that broke."""
        return self._future.result(seconds)

    def ends_by(self, when: float) -> bool:
        """Wait, at most until then; `time.monotonic()`."""
        return bool(wait([self._future], max(0.0, when - time.monotonic())).done)

    def leave(self) -> None:
        """Close the connection without waiting for the answer."""
        self._future.cancel()


class Clients:
    """Requests that run beside the test, each over a connection of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def post(self, client: Client, path: str, body: Any) -> Answer:
        return Answer(asyncio.run_coroutine_threadsafe(client.request("POST", path, body), self._loop))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whoever still waits leaves."""
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def assert_error(name: str, answer: Answer, statuses: set[int], reason: str, by: float) -> None:
    """It ends by that time, with one of these statuses and a message in which `reason` is found."""
    assert answer.ends_by(by), f"{name}: no answer yet"
    status, content = answer.result(0)
    assert status in statuses, f"{name}: {status} {content}"
    assert re.search(reason, content["error"]["message"]), f"{name}: {content}"


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
