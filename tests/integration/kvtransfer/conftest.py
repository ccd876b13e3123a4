"""Real worker processes, driven from the test."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from support.hosts import ON_HOST, Host

WORKER = Path(__file__).with_name("worker.py")
FAST = {
    "handshake_timeout": 8,
    "bootstrap_timeout": 8,
    "receive_timeout": 8,
    "transfer_timeout": 8,
    "heartbeat_interval": 0.5,
}


TRANSPORTS: dict[str, dict[str, Any]] = {
    "nixl": {"backend": "nixl"},
    "nixl-tcp": {"backend": "nixl", "ucx_tls": "tcp,self"},
    "mooncake": {"backend": "mooncake"},
}
"""Options of a worker for each way that pages can take."""


class Process:
    """One worker process; events and answers are told apart as they come."""

    def __init__(self, role: str, *, on: Host | None = None, **options: Any) -> None:
        """`on`: on that host; else on this one."""
        options.setdefault("settings", FAST)
        launcher: list[str] = []
        self.host = "127.0.0.1"
        if on is not None:
            launcher = [str(ON_HOST), on.netns]
            self.host = options["host"] = on.address
        # String hashes are how pages are compared across processes.
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(WORKER), role, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        self.events: list[dict[str, Any]] = []
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @cached_property
    def _ready(self) -> dict[str, Any]:
        """Waited for when first needed, so that workers start side by side."""
        return self._answers.get(timeout=60)

    @property
    def control(self) -> str:
        return str(self._ready["control"])

    @property
    def bootstrap(self) -> int:
        return int(self._ready["bootstrap"])

    @property
    def control_port(self) -> int:
        return int(self.control.rpartition(":")[2])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            if "event" in message:
                with self._news:
                    self.events.append({**message, "at": time.monotonic()})
                    self._news.notify_all()
            else:
                self._answers.put(message)

    def tell(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Call; the whole answer, errors included."""
        assert self._ready
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answers.get(timeout=20)

    def do(self, op: str, **arguments: Any) -> Any:
        answer = self.tell(op, **arguments)
        assert "error" not in answer, answer
        return answer["answer"]

    def wait(self, event: str, room: int, timeout: float = 10.0) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            return next((e for e in self.events if e["event"] == event and e["room"] == room), None)

        with self._news:
            assert self._news.wait_for(lambda: found() is not None, timeout), (event, room, self.events)
        result = found()
        assert result is not None
        return result

    def saw(self, event: str, room: int) -> bool:
        return any(e["event"] == event and e["room"] == room for e in self.events)

    def metric(self, name: str) -> float:
        """Sum over labels."""
        lines = self.do("metrics").splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith(f"diptych_transfer_{name}{{"))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> int:
        """Close standard input and wait for the orderly end."""
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            self.process.stdin.close()
        return self.process.wait(20)


def cpu_shares(workers: Sequence[Process], seconds: float) -> list[float]:
    """Share of one core that each used over a while of idling."""
    before = [worker.do("cpu") for worker in workers]
    time.sleep(seconds)
    after = [worker.do("cpu") for worker in workers]
    return [(b[0] - a[0]) / (b[1] - a[1]) for a, b in zip(before, after, strict=True)]


class Workers:
    def __init__(self) -> None:
        self._all: list[Process] = []

    def start(self, role: str, **options: Any) -> Process:
        made = Process(role, **options)
        self._all.append(made)
        return made

    def close(self) -> None:
        for worker in self._all:
            if worker.process.poll() is None:
                worker.signal(signal.SIGCONT)
                worker.process.kill()
            worker.process.wait(10)


def _workers() -> Iterator[Workers]:
    before = set(os.listdir("/dev/shm"))
    made = Workers()
    yield made
    made.close()
    left = {name for name in set(os.listdir("/dev/shm")) - before if "ucx" in name or "nixl" in name}
    assert not left


@pytest.fixture
def workers() -> Iterator[Workers]:
    """For tests that end or damage what they start."""
    yield from _workers()


@pytest.fixture(scope="module")
def shared_workers() -> Iterator[Workers]:
    """For tests that leave their workers as they found them."""
    yield from _workers()


def start_room(prefill: Process, decode: Process, room: int, pages: list[int], tokens: int) -> None:
    """Until prefill may write: `pages` are reserved at decode."""
    # No deadline of the room runs at one while the other starts.
    assert prefill.control
    assert decode.control
    prefill.do("open", room=room)
    decode.do("open", room=room, host=prefill.host, port=prefill.bootstrap)
    decode.wait("HandshakeDone", room)
    decode.do("reserve", room=room, pages=pages, num_prompt_tokens=tokens)
    prefill.wait("DestinationReady", room)


def transfer(prefill: Process, decode: Process, room: int, src: list[int], dst: list[int]) -> None:
    tokens = len(src) * 16
    start_room(prefill, decode, room, dst, tokens)
    prefill.do("send", room=room, src_pages=src, first_page_index=0)
    prefill.do("finish", room=room, tokens=tokens)
    decode.wait("Received", room)
    prefill.wait("Sent", room)
