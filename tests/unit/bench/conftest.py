"""A scripted completions server in a thread of its own, so that `main()` can run its own loop."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from typing import Any

import pytest
from aiohttp import web


@dataclasses.dataclass
class CompletionsServer:
    """Streams `max_tokens` events per request, `first` then `gap` seconds apart."""

    first: float = 0.0
    gap: float = 0.0
    tokens_per_event: int = 1
    fail_on: frozenset[int] = frozenset()
    """Numbers of the requests (from 0) that get a 500."""
    cut_on: frozenset[int] = frozenset()
    """Numbers of the requests whose stream ends without [DONE]."""
    url: str = ""
    bodies: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    now: int = 0
    most: int = 0
    """The most requests that ran at once."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        if number in self.fail_on:
            return web.json_response({"error": {"message": "scripted"}}, status=500)
        self.now += 1
        self.most = max(self.most, self.now)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        left = body["max_tokens"]
        await asyncio.sleep(self.first)
        while left > 0:
            step = min(self.tokens_per_event, left)
            left -= step
            await self._event(response, {"choices": [{"text": "x" * step, "finish_reason": None}]})
            if left:
                await asyncio.sleep(self.gap)
        if number not in self.cut_on:
            await self._event(response, {"choices": [{"text": "", "finish_reason": "length"}]})
            usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": len(body["prompt"])}
            await self._event(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        self.now -= 1
        await response.write_eof()
        return response

    @staticmethod
    async def _event(response: web.StreamResponse, data: Any) -> None:
        await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")


@pytest.fixture
def completions_server():
    server = CompletionsServer()
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start():
        app = web.Application()
        app.router.add_post("/v1/completions", server.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        return runner

    runner = None

    def run():
        nonlocal runner
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(5)
    yield server
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
