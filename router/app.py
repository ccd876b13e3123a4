"""The router's HTTP surface: which route does what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import version

import aiohttp
import msgspec
from aiohttp import web

from diptych.common_config import get_router, get_serving, readback
from diptych.router.call import Call, parse_fields
from diptych.router.errors import RouterError
from diptych.router.metrics import RouterMetrics
from diptych.router.middleware import REQUEST_ID, add_request_id, make_middleware, worker_headers
from diptych.router.pairing import POLICIES, Pairing
from diptych.router.proxy import Proxy, WorkerAnswer
from diptych.router.registry import WorkerRegistry
from diptych.router.relay import Relay
from diptych.router.workers import Worker, WorkerRole

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate")


def json_response(data: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(data), content_type="application/json")


def client_session() -> aiohttp.ClientSession:
    """For all calls to workers: any number of connections, streams of any length, bytes untouched."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=get_router().connect_timeout),
        auto_decompress=False,
        # Without these two a worker might compress, or a cookie of one client's answer reach another's.
        skip_auto_headers=["Accept-Encoding"],
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def registry_from_config() -> WorkerRegistry:
    """The workers named by `--prefill` and `--decode`."""
    prefill = [Worker(WorkerRole.PREFILL, p.url, p.bootstrap_port) for p in get_router().prefill]
    decode = [Worker(WorkerRole.DECODE, url) for url in get_router().decode]
    return WorkerRegistry([*prefill, *decode])


class RouterServer:
    """The parts of one router, and its routes. Needs the configuration published."""

    def __init__(self) -> None:
        self.registry = registry_from_config()
        self.metrics = RouterMetrics()
        for worker in self.registry.workers:
            self.metrics.watch(worker)
        policy = POLICIES[get_router().policy]
        self._pairing = Pairing(self.registry, policy(), policy())
        # Set by `_lifespan`: a session belongs to the running loop.
        self._relay: Relay | None = None
        self._proxy: Proxy | None = None

    @property
    def relay(self) -> Relay:
        assert self._relay is not None, "the application isn't running"
        return self._relay

    @property
    def proxy(self) -> Proxy:
        assert self._proxy is not None, "the application isn't running"
        return self._proxy

    def app(self) -> web.Application:
        """The aiohttp application; run it with `handler_cancellation=True`."""
        app = web.Application(
            middlewares=[make_middleware(self.metrics)], client_max_size=get_serving().max_request_bytes
        )
        app.on_response_prepare.append(add_request_id)
        app.cleanup_ctx.append(self._lifespan)
        for path in GENERATING:
            app.router.add_post(path, self.generate)
        for path in ("/v1/models", "/v1/models/{name}", "/model_info", "/get_model_info"):
            app.router.add_get(path, self.from_decode)
        for path in ("/tokenize", "/detokenize"):
            app.router.add_post(path, self.from_decode)
        app.router.add_get("/health", self.health)
        app.router.add_get("/health_generate", self.health_generate)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self.server_info)
        app.router.add_get("/get_load", self.get_load)
        app.router.add_get("/metrics", self.show_metrics)
        for path in ("/flush_cache", "/abort_request"):
            app.router.add_post(path, self.to_all_workers)
        return app

    async def _lifespan(self, _: web.Application) -> AsyncIterator[None]:
        async with client_session() as session:
            self._relay = Relay(session, self._pairing, self.metrics)
            self._proxy = Proxy(session, self.registry)
            self.registry.start(session)
            yield
            await self.registry.stop()
            await self.relay.close()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self.relay.generate(
            request, self._call(request, request.path, parse_fields(await request.read()))
        )

    async def from_decode(self, request: web.Request) -> web.StreamResponse:
        return await self.proxy.to_decode(request)

    async def health(self, _: web.Request) -> web.Response:
        if self.relay.draining:
            raise RouterError(503, "the router is shutting down")
        if not self.registry.has_pair:
            raise RouterError(503, f"not ready: {self.registry.missing()}", retry_after=1)
        return json_response({"status": "ok"})

    async def health_generate(self, request: web.Request) -> web.StreamResponse:
        """One real token through a pair."""
        probe = msgspec.json.encode(
            {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
        )
        return await self.relay.generate(request, self._call(request, "/generate", parse_fields(probe)))

    async def server_info(self, _: web.Request) -> web.Response:
        workers = [
            {
                "url": w.url,
                "role": w.role,
                "bootstrap_port": w.bootstrap_port,
                "healthy": w.healthy,
                "reason": w.reason or None,
                "in_flight": w.in_flight,
            }
            for w in self.registry.workers
        ]
        return json_response(
            {
                "role": "router",
                "version": version("diptych"),
                "ready": self.registry.has_pair and not self.relay.draining,
                "workers": workers,
                "config": readback(),
            }
        )

    async def get_load(self, request: web.Request) -> web.Response:
        return json_response([answer.describe() for answer in await self.proxy.to_all(request)])

    async def show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self.metrics.exposition(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def to_all_workers(self, request: web.Request) -> web.Response:
        answers = await self.proxy.to_all(request)
        return json_response([a.describe() for a in answers], status=_joint_status(answers))

    @staticmethod
    def _call(request: web.Request, path: str, fields: dict[str, msgspec.Raw]) -> Call:
        headers = {**worker_headers(request), "Content-Type": "application/json"}
        return Call(path=path, fields=fields, headers=headers, request_id=request[REQUEST_ID])


def _joint_status(answers: list[WorkerAnswer]) -> int:
    """200 if every worker did it; a 4xx they agree on; else 502."""
    if all(a.ok for a in answers):
        return 200
    statuses = {a.status for a in answers}
    only = statuses.pop() if len(statuses) == 1 else None
    return only if only is not None and 400 <= only < 500 else 502
