"""Scripted workers on real sockets, and a real router between them and an ordinary HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from diptych.common_config import Program, Role, parse_command_line, publish
from diptych.router.app import RouterServer

PATIENCE = 5.0
"""Seconds after which a test that waits for something has failed."""


async def eventually(condition: Callable[[], bool]) -> None:
    """Return once it holds; TimeoutError after PATIENCE seconds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 (any state of any object: there is no event to wait for)
            await asyncio.sleep(0.005)


@dataclasses.dataclass
class Seen:
    """One generating request as a worker saw it."""

    body: dict[str, Any]
    headers: Mapping[str, str]
    left: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when the router dropped the connection before the answer was complete."""


Script = Callable[[web.Request, Seen], Awaitable[web.StreamResponse]]


class ScriptedWorker:
    """A worker whose answers a test writes. `script` may be replaced at any time."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.other: list[tuple[str, str, bytes]] = []
        self.pages: dict[str, Any] = {}
        """What a path answers: text, or data for JSON, or a function that makes the answer."""
        self.health_status = 200
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"):
            app.router.add_post(path, self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{rest:.*}", self._other)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def wait_for_requests(self, count: int) -> None:
        await eventually(lambda: len(self.seen) >= count)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(await request.json(), request.headers)
        self.seen.append(seen)
        try:
            return await self.script(request, seen)
        except (asyncio.CancelledError, ConnectionResetError):
            seen.left.set()
            raise

    async def _other(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.other.append((request.method, request.path, body))
        page = self.pages.get(request.path)
        if callable(page):
            return await page(request)
        if isinstance(page, str):
            return web.Response(text=page)
        if page is not None:
            return web.json_response(page)
        return web.json_response({"worker": self.port, "path": request.path, "echo": body.decode()})


# ---- scripts ------------------------------------------------------------------------------------------


def answers(status: int = 200, data: Any = None, **headers: str) -> Script:
    async def script(_: web.Request, __: Seen) -> web.StreamResponse:
        return web.json_response({"ok": True} if data is None else data, status=status, headers=headers)

    return script


def fails(status: int, message: str) -> Script:
    error = {"message": message, "type": "x", "param": None, "code": None}
    return answers(status, {"error": error})


async def hangs(_: web.Request, __: Seen) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def breaks(request: web.Request, _: Seen) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


async def open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def streams(events: list[bytes], then: Script | None = None) -> Script:
    """An event stream; `then` decides how it goes on after the events."""

    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await open_stream(request)
        for data in events:
            await response.write(data)
        if then is not None:
            await then(request, seen)
        await response.write_eof()
        return response

    return script


# ---- the router ---------------------------------------------------------------------------------------


class RunningRouter:
    """A router on a real socket, and a client of it."""

    def __init__(self, server: RouterServer, url: str, client: aiohttp.ClientSession) -> None:
        self.server = server
        self.url = url
        self.client = client

    def post(self, path: str = "/v1/completions", data: Any = None, **options: Any) -> Any:
        body = {"model": "m", "prompt": "hi"} if data is None else data
        return self.client.post(self.url + path, json=body, **options)

    def get(self, path: str, **options: Any) -> Any:
        return self.client.get(self.url + path, **options)

    async def metric(self, line_start: str) -> float:
        """The value of the first metric line with this start (0 if there is none)."""
        async with self.get("/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith(line_start):
                    return float(line.rsplit(" ", 1)[1])
        return 0.0

    async def wait_idle(self) -> None:
        """Until no worker has a request of this router."""
        await eventually(lambda: not any(w.in_flight for w in self.server.registry.workers))


@contextlib.asynccontextmanager
async def running_router(
    prefills: list[ScriptedWorker], decodes: list[ScriptedWorker], *flags: str, ready: bool = True
) -> AsyncIterator[RunningRouter]:
    argv = ["--health-interval", "0.1", *flags]
    for number, prefill in enumerate(prefills):
        argv += ["--prefill", prefill.url, str(9000 + number)]
    for decode in decodes:
        argv += ["--decode", decode.url]
    publish(parse_command_line(Program.ROUTER, argv), role=Role.ROUTER)
    server = RouterServer()
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            if ready:
                await eventually(lambda: all(w.healthy for w in server.registry.workers))
            yield RunningRouter(server, f"http://127.0.0.1:{runner.addresses[0][1]}", client)
    finally:
        await runner.cleanup()


class WorkerMaker:
    def __init__(self) -> None:
        self.made: list[ScriptedWorker] = []

    async def __call__(self, script: Script) -> ScriptedWorker:
        worker = ScriptedWorker(script)
        await worker.start()
        self.made.append(worker)
        return worker


@pytest.fixture
async def make_worker() -> AsyncIterator[WorkerMaker]:
    maker = WorkerMaker()
    yield maker
    for worker in maker.made:
        await worker.stop()


class Kit:
    """What the tests of this folder use, without importing a conftest."""

    answers = staticmethod(answers)
    fails = staticmethod(fails)
    hangs = staticmethod(hangs)
    breaks = staticmethod(breaks)
    event = staticmethod(event)
    open_stream = staticmethod(open_stream)
    streams = staticmethod(streams)
    router = staticmethod(running_router)
    eventually = staticmethod(eventually)
    PATIENCE = PATIENCE


@pytest.fixture
def kit() -> type[Kit]:
    return Kit
