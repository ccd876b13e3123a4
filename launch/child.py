"""One child process of `launch-local`: its output relayed with a prefix, its end tied to ours."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TextIO

_PR_SET_PDEATHSIG = 1
_LONGEST_LINE = 1 << 20


class ChildFailed(Exception):
    """A child ended before it was ready, or on its own."""


class Child:
    """Runs `python -m MODULE ARGUMENTS…` in a session of its own, so that a Ctrl-C reaches us alone."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._relays = [
            asyncio.create_task(self._relay(process.stdout, sys.stdout)),
            asyncio.create_task(self._relay(process.stderr, sys.stderr)),
        ]

    @classmethod
    async def start(
        cls, name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str | None]
    ) -> Child:
        """`environment` is laid over this process's own; None takes a variable out."""
        parent = os.getpid()

        def die_with_parent() -> None:
            """Runs between fork and exec. Even our kill -9 then ends the child with SIGTERM."""
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

        # Loaded before the fork: the child may only make plain system calls.
        libc = ctypes.CDLL(None)
        laid: dict[str, str | None] = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            env={name: value for name, value in laid.items() if value is not None},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        return cls(name, process)

    async def ready_line(self) -> str:
        """What follows `ready: ` in the child's output. Raises `ChildFailed` if it ends first."""
        ended = asyncio.create_task(self._process.wait())
        either: set[asyncio.Future[Any]] = {ended, self._ready}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            ended.cancel()
            return self._ready.result()
        raise ChildFailed(f"{self.name} ended with exit code {ended.result()} before it was ready")

    async def end(self) -> int:
        """Wait for the process and the last of its output; the exit code."""
        code = await self._process.wait()
        await asyncio.gather(*self._relays)
        return code

    def terminate(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def _relay(self, source: asyncio.StreamReader | None, target: TextIO) -> None:
        assert source is not None
        async for line in _lines(source):
            text = line.decode(errors="replace")
            print(f"[{self.name}] {text}", file=target, flush=True)
            if text.startswith("ready: ") and not self._ready.done():
                self._ready.set_result(text.removeprefix("ready: "))


async def _lines(source: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines without their end; one longer than `_LONGEST_LINE` comes in pieces. Whatever a child prints, its
    pipe is read on: a full one would stop the child in the middle of a print."""
    rest = b""
    while chunk := await source.read(1 << 16):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > _LONGEST_LINE:
            yield rest
            rest = b""
    if rest:
        yield rest
