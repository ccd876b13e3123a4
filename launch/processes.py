"""The scheduler process as its frontend sees it: how it is started, watched and ended.

The frontend keeps the write end of the scheduler's stdin open for as long as it lives. The scheduler reads
one start message from it and then watches for its end: when the frontend is gone, however it went, so is
the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Sequence

import msgspec

_LENGTH_BYTES = 4
_MAX_START_BYTES = 16 << 20

# Read by the OpenMP runtime when torch is loaded. Its threads wait for each other by spinning, which is
# fine while a process has its cores alone; with two workers on the same cores each spins away the other's
# time. Measured, two workers on two cores: a decode step 303 ms spinning, 28 ms waiting; alone, no difference.
COMPUTE_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}


class StartError(Exception):
    """The start message on stdin is missing or damaged."""


class SchedulerStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler needs before it can build anything."""

    record: bytes
    """`LaunchConfig.to_bytes()`, secrets included."""
    role: str
    """A `Role`'s value: `prefill_scheduler`, …"""
    address: str
    """ZMQ address of the frontend's PAIR socket, to connect to."""
    model_dir: str
    """Where `prepare_model` put config.json, tokenizer and weights."""


def read_start(fd: int) -> SchedulerStart:
    """Scheduler side: read the message from stdin's descriptor, and not a byte more, so that the caller can
    go on watching it for end-of-file. Raises `StartError`."""
    size = int.from_bytes(_read_exactly(fd, _LENGTH_BYTES), "big")
    if size > _MAX_START_BYTES:
        raise StartError(f"a start message of {size} bytes: is this process started by a launcher?")
    try:
        return msgspec.msgpack.decode(_read_exactly(fd, size), type=SchedulerStart)
    except msgspec.DecodeError as error:
        raise StartError(f"not a start message: {error}") from None


def _read_exactly(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            raise StartError("stdin ended before the start message was complete")
        data += part
    return bytes(data)


class SchedulerProcess:
    """A running scheduler. Create it inside a running event loop."""

    def __init__(self, command: Sequence[str], start: SchedulerStart) -> None:
        # A process group of its own: Ctrl-C in a terminal reaches the frontend alone, which drains.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, process_group=0, env={**COMPUTE_ENVIRONMENT, **os.environ}
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """The exit code, negative for a signal."""
        self._loop.add_reader(self._pidfd, self._on_exit)
        payload = msgspec.msgpack.encode(start)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; `exited` says so
            self._process.stdin.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.exited.set_result(self._process.wait())

    async def end(self, bound: float) -> None:
        """Close its stdin, which tells it to stop, and kill it if it still runs after `bound` seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # an unread start message has no reader any more
            self._process.stdin.close()
        try:
            await self.exits_within(bound)
        finally:  # also when this task is told to hurry
            if not self.exited.done():
                self._process.kill()
        await self.exited

    async def exits_within(self, bound: float) -> bool:
        await asyncio.wait({self.exited}, timeout=bound)
        return self.exited.done()


def describe_exit(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
