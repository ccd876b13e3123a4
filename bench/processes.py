"""A process that answers JSON lines."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


class ProcessFailed(Exception):
    """It ended instead of answering."""


def calls_from_stdin() -> io.FileIO:
    """For such a process. Unbuffered: what is left in a buffer would wake no poller."""
    return open(0, "rb", buffering=0, closefd=False)


class JsonProcess:
    """One `python -m MODULE ARGUMENTS…`. Its first answer comes unasked, once it is ready."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._name = f"{module} {arguments[0]}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, op: str, **arguments: Any) -> None:
        """Call without waiting; `answer` has what comes of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The next answer. Raises `ProcessFailed` when none will come."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ProcessFailed(f"{self._name} ended with exit code {self._process.wait()}")
        return json.loads(line)["answer"]

    def ask(self, op: str, **arguments: Any) -> Any:
        self.tell(op, **arguments)
        return self.answer()

    def close(self) -> None:
        """Its standard input ends; what doesn't follow within 20 s is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            print(f"{self._name} did not end: killed", file=sys.stderr)
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def json_process(module: str, *arguments: str) -> Iterator[JsonProcess]:
    process = JsonProcess(module, *arguments)
    try:
        yield process
    finally:
        process.close()
