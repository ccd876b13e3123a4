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

# How long an OpenMP thread spins for its peers before it sleeps, in turns of a loop (about 15 microseconds).
# libgomp's own default spins for milliseconds: fine for a process that has its cores alone, ruinous for two
# workers that share them, each spinning away the other's time. Never spinning costs a lone worker a wake-up
# per parallel region. Measured on two cores, ms of a decode step alone / in each of two workers at once:
# default 20 / 310, 10,000 turns 20 / 125, 1,000 turns 22 / 40, none 29 / 31.
_SPIN_TURNS = "1000"


def compute_environment() -> dict[str, str]:
    """The environment of a process that computes; what the operator set for OpenMP stays as it is."""
    environment = dict(os.environ)
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_TURNS)
    return environment


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
            command, stdin=subprocess.PIPE, process_group=0, env=compute_environment()
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
