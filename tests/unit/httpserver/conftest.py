"""A small application on bounded connections, and clients that misbehave on them byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from diptych.httpserver.limits import HttpLimits
from diptych.httpserver.listen import BoundedSite, make_runner
from diptych.httpserver.protocol import BodyTooSlow
from diptych.httpserver.refusals import Cause

GENEROUS = HttpLimits(receive_timeout=30, send_timeout=30, keepalive_timeout=30, max_connections=100)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, object]:
        assert self.headers["content-type"] == "application/json; charset=utf-8" or (
            self.headers["content-type"] == "application/json"
        )
        return json.loads(self.body)["error"]


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(head[0].split()[1]), headers, body)

    async def ended(self) -> bytes:
        """What still came before the server closed the connection."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()


@dataclass
class Server:
    port: int
    runner: web.AppRunner
    refused: list[Cause]
    """Of connections that ended in an error before a request reached a route."""
    streaming: asyncio.Event = field(default_factory=asyncio.Event)
    """A stream of `/flood` or `/quiet` has begun."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """The handler of one was cancelled."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets `/quiet` end."""

    async def until_no_connection(self) -> None:
        assert self.runner.server is not None
        while self.runner.server.connections:  # noqa: ASYNC110 (aiohttp tells nobody)
            await asyncio.sleep(0.01)


def make_app(server: list[Server]) -> web.Application:
    async def echo(request: web.Request) -> web.Response:
        try:
            return web.Response(body=await request.read())
        except BodyTooSlow as error:
            slow = web.json_response({"error": {"message": str(error)}}, status=408)
            slow.force_close()
            return slow

    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        server[0].streaming.set()
        try:
            while not server[0].go_on.is_set():
                await response.write(bytes(1 << 16))
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            server[0].cancelled.set()
            raise
        return response

    async def quiet(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        server[0].streaming.set()
        await server[0].go_on.wait()
        await response.write(b"at last")
        return response

    app = web.Application()
    app.add_routes(
        [web.get("/", hello), web.post("/echo", echo), web.get("/flood", flood), web.get("/quiet", quiet)]
    )
    return app


@contextlib.asynccontextmanager
async def serving(limits: HttpLimits = GENEROUS, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    made: list[Server] = []
    runner = make_runner(make_app(made))
    await runner.setup()
    refused: list[Cause] = []
    await BoundedSite(runner, limits, refused.append, host="127.0.0.1", tls=tls).start()
    made.append(Server(runner.addresses[0][1], runner, refused))
    try:
        async with asyncio.timeout(10):
            yield made[0]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def connected(server: Server, tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    name = "localhost" if tls is not None else None
    client = Client(*await asyncio.open_connection("127.0.0.1", server.port, ssl=tls, server_hostname=name))
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A self-signed certificate of localhost: `cert`, `key`, `encrypted` (the key with password `secret`),
    `other` (another key)."""
    from support.certificates import make_certificate

    return make_certificate(tmp_path_factory.mktemp("tls"))
