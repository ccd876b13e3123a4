"""`python -m diptych.bench.echo_worker`: a worker without a model, to measure and test a router with.

It answers at once, or at a pace that it is told: so many seconds for each prompt token that its simulated
prefix cache lacks, one prompt at a time as one accelerator would, and so many between two output tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import signal
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import aiohttp
from aiohttp import web

from diptych.bench.echo_answers import Answer
from diptych.bench.simulated_cache import SimulatedCache, prompts_of

ROLES = {"prefill": "prefill", "decode": "decode", "colocated": "null"}
"""Role → what `/server_info` calls it."""

REMEMBERED_ROOMS = 4096
"""Rooms that nobody has asked about yet; the oldest are forgotten."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EchoSettings:
    """How an echo worker behaves. Each field is a flag of the command too."""

    role: str = "colocated"
    model: str = "echo"
    max_tokens: int = 16
    """Output tokens of a request that doesn't say."""
    token_gap: float = 0.0
    """Seconds between two output tokens."""
    seconds_per_prompt_token: float = 0.0
    """Compute of a token that isn't cached; prompts are computed one after the other."""
    cache_pages: int = 4096
    """Pages that the simulated prefix cache holds."""
    page_size: int = 16
    """Tokens in a page."""
    body_delay: float = 0.0
    """Seconds between a prefill worker's first token and the end of its body."""
    await_prefill: bool = False
    """A decode worker answers once the room's prefill worker has computed the prompt: it asks at the
    bootstrap address, which must be an echo worker's HTTP port."""


@dataclasses.dataclass
class Totals:
    """Counted since the start."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    running: int = 0


class EchoWorker:
    """One worker; `totals` may be read at any time."""

    def __init__(self, settings: EchoSettings) -> None:
        self.settings = settings
        self.cache = SimulatedCache(settings.cache_pages, settings.page_size)
        self.totals = Totals()
        self.port = 0
        self._rooms: OrderedDict[int, asyncio.Future[int]] = OrderedDict()
        self._compute = asyncio.Lock()
        self._ids = itertools.count()
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; `port` then tells where."""
        app = web.Application(client_max_size=1 << 26)
        for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            app.router.add_post(path, self._generate)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/get_load", self._load)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/rooms/{room:\\d+}", self._room)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/abort_request", self._health)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=4096).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None and self._session is not None:
            await self._runner.cleanup()
            await self._session.close()
            self._runner = None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            fields = json.loads(await request.read())
            prompts = prompts_of(request.path, fields)
        except (ValueError, AttributeError) as error:
            return web.json_response({"error": {"message": str(error), "code": None}}, status=400)
        self.totals.requests += 1
        self.totals.running += 1
        try:
            return await self._answer(request, fields, prompts)
        finally:
            self.totals.running -= 1

    async def _answer(
        self, request: web.Request, fields: dict[str, Any], prompts: list[list[int]]
    ) -> web.StreamResponse:
        settings = self.settings
        cached = await self._prompt(fields, prompts)
        sampling = fields.get("sampling_params") or {}
        wanted = fields.get("max_completion_tokens") or fields.get("max_tokens")
        tokens = wanted or sampling.get("max_new_tokens") or settings.max_tokens
        if settings.role == "prefill":
            tokens = 1
        answer = Answer(
            request.path,
            f"echo-{next(self._ids)}",
            settings.model,
            len(prompts),
            tokens,
            sum(map(len, prompts)),
            cached,
        )
        if not fields.get("stream"):
            await asyncio.sleep(settings.token_gap * (tokens - 1) + settings.body_delay)
            return web.json_response(answer.whole())
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        options = fields.get("stream_options") or {}
        for number, data in enumerate(answer.events(bool(options.get("include_usage")))):
            if number and settings.token_gap:
                await asyncio.sleep(settings.token_gap)
            await response.write(data)
        if settings.body_delay:
            await asyncio.sleep(settings.body_delay)
        await response.write_eof()
        return response

    async def _prompt(self, fields: dict[str, Any], prompts: list[list[int]]) -> int:
        """Compute the prompts, or wait for the worker that does. Returns how many tokens were cached."""
        if self.settings.role == "decode":
            return await self._ask_prefill(fields) if self.settings.await_prefill else 0
        async with self._compute:
            cached = 0
            for prompt in prompts:
                hit = self.cache.match_and_insert(prompt)
                cached += hit
                await asyncio.sleep((len(prompt) - hit) * self.settings.seconds_per_prompt_token)
        self.totals.prompt_tokens += sum(map(len, prompts))
        self.totals.cached_tokens += cached
        room = fields.get("bootstrap_room")
        if isinstance(room, int):
            computed = self._room_future(room)
            if not computed.done():
                computed.set_result(cached)
        return cached

    async def _ask_prefill(self, fields: dict[str, Any]) -> int:
        assert self._session is not None
        host, port = fields["bootstrap_host"], fields["bootstrap_port"]
        url = f"http://{host}:{port}/rooms/{fields['bootstrap_room']}"
        async with self._session.get(url) as response:
            return int(await response.text())

    def _room_future(self, room: int) -> asyncio.Future[int]:
        if room not in self._rooms:
            self._rooms[room] = asyncio.get_running_loop().create_future()
            while len(self._rooms) > REMEMBERED_ROOMS:
                self._rooms.popitem(last=False)[1].cancel()
        return self._rooms[room]

    async def _room(self, request: web.Request) -> web.Response:
        """Cached tokens of a room's prompt, once it is computed."""
        room = int(request.match_info["room"])
        cached = await asyncio.shield(self._room_future(room))
        self._rooms.pop(room, None)
        return web.Response(text=str(cached))

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _flush(self, _: web.Request) -> web.Response:
        self.cache.clear()
        return web.json_response({"success": True})

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.settings.model, "object": "model", "created": 0, "owned_by": "echo"}
        return web.json_response({"object": "list", "data": [model]})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "disaggregation_mode": ROLES[self.settings.role],
                "served_model_name": self.settings.model,
                "model_path": self.settings.model,
                "echo": {**dataclasses.asdict(self.settings), **dataclasses.asdict(self.totals)},
            }
        )

    async def _model_info(self, _: web.Request) -> web.Response:
        name = self.settings.model
        return web.json_response({"model_path": name, "tokenizer_path": name, "is_generation": True})

    async def _load(self, _: web.Request) -> web.Response:
        load = {"dp_rank": 0, "num_reqs": self.totals.running, "num_waiting_reqs": 0, "num_tokens": 0}
        return web.json_response([load])

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = []
        for name, value in dataclasses.asdict(self.totals).items():
            kind, suffix = ("gauge", "") if name == "running" else ("counter", "_total")
            metric = f"diptych_echo_{name}{suffix}"
            lines += [f"# HELP {metric} {name}.", f"# TYPE {metric} {kind}", f"{metric} {value}"]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")


async def _serve(settings: EchoSettings, host: str, port: int) -> None:
    worker = EchoWorker(settings)
    await worker.start(host, port)
    print(f"ready: http://{host}:{worker.port} (echo worker, {settings.role})", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await worker.stop()


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m diptych.bench.echo_worker", description=__doc__)
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=0, help="0 takes a free one; the ready line tells which")
    for field in dataclasses.fields(EchoSettings):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            p.add_argument(flag, action="store_true")
        else:
            choices = tuple(ROLES) if field.name == "role" else None
            p.add_argument(flag, type=type(field.default), default=field.default, choices=choices)
    args = vars(p.parse_args(argv))
    host, port = args.pop("host"), args.pop("port")
    asyncio.run(_serve(EchoSettings(**args), host, port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
