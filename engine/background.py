"""Work off the scheduler's thread, and the descriptor by which other threads wake its one poller."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec

P = ParamSpec("P")

log = logging.getLogger(__name__)


class Wakeup:
    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._closed = False

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        """From any thread. A full pipe is as readable as it gets."""
        try:
            os.write(self._write, b"x")
        except BlockingIOError:
            return

    def clear(self) -> None:
        try:
            while os.read(self._read, 4096):
                continue
        except BlockingIOError:
            return

    def close(self) -> None:
        """Only once no thread can call `set` any more. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._read)
            os.close(self._write)


class BackgroundPool:
    """A few threads whose finished work makes `wakeup` readable. Threads start with the first work."""

    def __init__(self, *, threads: int, name: str, wakeup: Wakeup | None = None) -> None:
        """`wakeup`: another pool's, which must be closed after this one."""
        self._shares = wakeup is not None
        self.wakeup = wakeup or Wakeup()
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)

    def submit(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """`work` puts its result where the scheduler's thread will look; it must not raise."""

        def run() -> None:
            try:
                work(*args, **kwargs)
            except BaseException:
                # Nobody asks the future that it ends up in.
                log.exception("work in the background broke off")
                raise
            finally:
                self.wakeup.set()

        self._pool.submit(run)

    def close(self) -> None:
        """Waits for what runs, drops what doesn't yet. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if not self._shares:
            self.wakeup.close()
