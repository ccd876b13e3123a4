"""A server under test: started, waited for, and always ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

STOP_TIMEOUT = 30.0
"""Seconds that a server gets to stop by itself after SIGTERM."""


class ServerFailed(Exception):
    """The server ended, or was not ready in time."""


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def script(name: str) -> str:
    """A command beside this interpreter, or on PATH. Raises FileNotFoundError."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is neither beside {sys.executable} nor on PATH")
    return found


def server_command(name: str, model: str, port: int, flags: Sequence[str]) -> list[str]:
    """What starts a server of a model."""
    return [script(name), "--model-path", model, "--port", str(port), *flags]


@contextlib.contextmanager
def running_server(command: Sequence[str], log: Path, ready_timeout: float = 300.0) -> Iterator[float]:
    """Run `command` until the block ends; yields the seconds it took to print its `ready:` line.

    Its output goes to `log`. It leads a process group of its own: it is asked to stop by SIGTERM, and what
    is left of the group after STOP_TIMEOUT is killed. Raises ServerFailed with the end of the log.
    """
    started = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        ready = threading.Event()
        assert process.stdout is not None
        reader = threading.Thread(target=_copy, args=(process.stdout, sink, ready), daemon=True)
        reader.start()
        try:
            if not _wait(process, ready, reader, started + ready_timeout):
                code = process.poll()
                what = f"not ready after {ready_timeout:g} s" if code is None else f"exit code {code}"
                raise ServerFailed(f"{command[0]}: {what}\n{log.read_text(errors='replace')[-2000:]}")
            yield time.monotonic() - started
        finally:
            _stop(process)
            # Bounded: a process that left the group may still hold the other end.
            reader.join(STOP_TIMEOUT)


def _copy(source: IO[bytes], sink: IO[bytes], ready: threading.Event) -> None:
    for line in source:
        sink.write(line)
        sink.flush()
        if line.startswith(b"ready:"):
            ready.set()


def _wait(
    process: subprocess.Popen[bytes], ready: threading.Event, reader: threading.Thread, until: float
) -> bool:
    """True once ready; False when time is up or the server's output has ended."""
    while time.monotonic() < until:
        if ready.wait(0.1):
            return True
        if process.poll() is not None:
            reader.join(1)
            return ready.is_set()
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        print(f"pid {process.pid} did not stop within {STOP_TIMEOUT:g} s: killed", file=sys.stderr)
    # Also when the leader ended well: a child it left behind would disturb the next measurement.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
