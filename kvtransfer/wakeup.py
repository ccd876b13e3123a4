"""A file descriptor that another thread makes readable, so that the scheduler's one poller wakes up."""

from __future__ import annotations

import os


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
