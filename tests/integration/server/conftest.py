from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

LAUNCHER = Path(__file__).with_name("launch_scripted.py")
MODEL = "smollm2-135m-instruct"


class Worker:
    """A frontend process with its scripted scheduler."""

    def __init__(self, kind: str, *flags: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(LAUNCHER), kind, "--model-path", MODEL, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.stderr = ""
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()
        self.url = ""
        self.ready_line = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.match(r"ready: (\S+)", line)
            if found:
                self.url, self.ready_line = found[1], line
                break

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr += line

    @property
    def scheduler(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 20.0) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.wait()
        finally:
            if self.process.poll() is None:
                self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()


def say(text: str = "", **directive: object) -> str:
    """A prompt that makes the scripted scheduler say `text`."""
    return "@@" + json.dumps({"say": text, **directive}) + "@@"


def chat(text: str = "", **fields: object) -> dict[str, object]:
    """A chat request whose answer is `text`; directives of the scripted scheduler go into `script`."""
    script = fields.pop("script", {})
    assert isinstance(script, dict)
    return {"messages": [{"role": "user", "content": say(text, **script)}], **fields}


def wait_until(true: Callable[[], bool], timeout: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


async def eventually(true: Callable[[], Awaitable[bool]], bound: float = 5.0) -> None:
    """Ask another process until it says so; nothing of ours could wake us."""
    async with asyncio.timeout(bound):
        while not await true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def colocated() -> Iterator[Worker]:
    worker = Worker("colocated")
    yield worker
    code = worker.stop()
    assert (code, worker.stderr) == (0, "")


@pytest.fixture(scope="session")
def prefill() -> Iterator[Worker]:
    worker = Worker("prefill", "--disaggregation-bootstrap-port", "0")
    yield worker
    assert worker.stop() == 0


@pytest.fixture(scope="session")
def decode() -> Iterator[Worker]:
    worker = Worker("decode")
    yield worker
    assert worker.stop() == 0


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(*args: str, **options: dict[str, str]) -> Worker:
        made.append(Worker(*args, **options))
        return made[-1]

    yield make
    for worker in made:
        worker.stop()


class Client:
    """Requests to one worker."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(self, path: str, body: object = None, **options: object) -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str, **options: object) -> tuple[int, dict]:
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict) -> list[dict]:
        """The streamed events, without the closing `[DONE]`, which must be there."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            frames = (await response.read()).decode().split("\n\n")
        assert frames.pop() == ""
        assert frames.pop() == "data: [DONE]"
        assert all(frame.startswith("data: ") for frame in frames)
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]

    async def running(self) -> int:
        """Samples that the scheduler is at."""
        return (await self.get("/server_info"))[1]["load"]["num_running_reqs"]

    async def until_running(self, count: int, bound: float = 5.0) -> None:
        async def reached() -> bool:
            return await self.running() == count

        await eventually(reached, bound)

    async def until_unhealthy(self) -> None:
        async def unhealthy() -> bool:
            async with self.session.get(self.url + "/health") as response:
                return response.status == 503

        await eventually(unhealthy)

    async def received(self) -> list[dict]:
        """What reached the scheduler."""
        _, info = await self.get("/server_info")
        return info["scheduler"]["received"]


@pytest.fixture
async def session():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


@pytest.fixture
def client(colocated: Worker, session: aiohttp.ClientSession) -> Client:
    return Client(colocated.url, session)
