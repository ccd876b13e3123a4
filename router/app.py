"""The router's HTTP surface: which route does what."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from diptych.common_config import get_router, get_serving
from diptych.httpserver.endpoints import add_route
from diptych.httpserver.request_id import REQUEST_ID, add_request_id
from diptych.httpserver.tls import worker_context
from diptych.router.admission import Admission
from diptych.router.answers import json_response
from diptych.router.call import Call, parse_fields
from diptych.router.errors import RouterError
from diptych.router.info_routes import InfoRoutes
from diptych.router.metrics import RouterMetrics
from diptych.router.middleware import make_middleware, worker_headers
from diptych.router.pairing import Pairing
from diptych.router.proxy import JOINT_SECONDS, Proxy, joint_answer
from diptych.router.queue_metrics import QueueMetrics
from diptych.router.registry import WorkerRegistry
from diptych.router.relay import Relay
from diptych.router.routes import NOTHING_TO_DO, ROUTES, SLOW_JOINT
from diptych.router.sockets import worker_sockets
from diptych.router.worker_metrics import EXPOSITION, scrape
from diptych.router.worker_routes import WorkerRoutes
from diptych.router.workers import Worker, WorkerRole

IDLE_SECONDS = 3.0
"""How long an idle connection to a worker is kept for the next request. A worker that closes one just when a
request goes out on it breaks that request, and nobody can be sure then that it hasn't run. So less than the
5 s of common servers, and than the 75 s of ours."""


def client_session() -> aiohttp.ClientSession:
    """For all calls to workers: any number of connections, streams of any length, bytes untouched. Raises
    `TlsError` if the certificates to check https workers by can't be read."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            ssl=worker_context(),
            socket_factory=worker_sockets(get_router().dead_peer_timeout),
            keepalive_timeout=IDLE_SECONDS,
        ),
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


def admission_from_config(metrics: QueueMetrics) -> Admission:
    """The queue for generating requests."""
    settings = get_router()
    admission = Admission(
        settings.max_concurrent_requests, settings.queue_size, settings.queue_timeout, metrics
    )
    metrics.watch(admission)
    return admission


class RouterServer:
    """The parts of one router, and its routes. Needs the configuration published."""

    def __init__(self) -> None:
        self.registry = registry_from_config()
        self.metrics = RouterMetrics()
        self.registry.subscribe(self.metrics)
        self.registry.subscribe(self.metrics.breakers)
        self._pairing = Pairing.configured(self.registry)
        self.admission = admission_from_config(self.metrics.queue)
        # Set by `_lifespan`: a session belongs to the running loop.
        self._session: aiohttp.ClientSession | None = None
        self._relay: Relay | None = None
        self._proxy: Proxy | None = None
        self._workers: WorkerRoutes | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the application isn't running"
        return self._session

    @property
    def relay(self) -> Relay:
        assert self._relay is not None, "the application isn't running"
        return self._relay

    @property
    def proxy(self) -> Proxy:
        assert self._proxy is not None, "the application isn't running"
        return self._proxy

    @property
    def info(self) -> InfoRoutes:
        return InfoRoutes(self.registry, self.session, self.proxy)

    @property
    def workers(self) -> WorkerRoutes:
        assert self._workers is not None, "the application isn't running"
        return self._workers

    @property
    def ready(self) -> bool:
        return self.registry.has_pair and not self.relay.draining

    def app(self) -> web.Application:
        """The aiohttp application; run it with `handler_cancellation=True`."""
        app = web.Application(
            middlewares=[make_middleware(self.metrics)], client_max_size=get_serving().max_request_bytes
        )
        app.on_response_prepare.append(add_request_id)
        app.cleanup_ctx.append(self._lifespan)
        handlers: dict[str, Handler] = {
            "generate": self.generate,
            "from_decode": self.from_decode,
            "to_all_workers": self.to_all_workers,
            "health": self.health,
            "health_generate": self.health_generate,
            "list_models": self.list_models,
            "show_model": self.show_model,
            "server_info": self.server_info,
            "get_load": self.get_load,
            "show_metrics": self.show_metrics,
            "show_engine_metrics": self.show_engine_metrics,
            "list_workers": self.list_workers,
            "add_worker": self.add_worker,
            "show_worker": self.show_worker,
            "remove_worker": self.remove_worker,
            "change_worker": self.change_worker,
            "show_document": self.show_document,
        }
        for name, endpoints in ROUTES.items():
            for endpoint in endpoints:
                add_route(app, endpoint, handlers[name])
        return app

    async def _lifespan(self, _: web.Application) -> AsyncIterator[None]:
        async with client_session() as session:
            self._session = session
            self._relay = Relay(session, self._pairing, self.admission, self.metrics)
            self._proxy = Proxy(session, self.registry)
            self._workers = WorkerRoutes(self.registry, session)
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
        call = self._call(request, "/generate", parse_fields(probe))
        # Past the queue: a router that is full is well.
        return await self.relay.generate(request, call, in_turn=False)

    async def list_models(self, _: web.Request) -> web.Response:
        return await self.info.list_models()

    async def show_model(self, request: web.Request) -> web.Response:
        return await self.info.show_model(request.match_info["name"])

    async def show_document(self, _: web.Request) -> web.Response:
        return await self.info.document()

    async def get_load(self, request: web.Request) -> web.Response:
        return await self.info.get_load(request)

    async def server_info(self, _: web.Request) -> web.Response:
        return await self.info.server_info(self.ready)

    async def show_metrics(self, _: web.Request) -> web.Response:
        """The router's own, then those of its workers."""
        workers = await scrape(self.registry, self.session)
        return web.Response(body=self.metrics.exposition() + workers, headers=EXPOSITION)

    async def show_engine_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=await scrape(self.registry, self.session), headers=EXPOSITION)

    async def to_all_workers(self, request: web.Request) -> web.Response:
        limit = get_router().request_timeout if request.path in SLOW_JOINT else JOINT_SECONDS
        answers = await self.proxy.to_all(request, limit=limit, leaving=True)
        return joint_answer(answers, NOTHING_TO_DO.get(request.path))

    async def list_workers(self, _: web.Request) -> web.Response:
        return self.workers.list()

    async def show_worker(self, request: web.Request) -> web.Response:
        return self.workers.show(request.match_info["worker_id"])

    async def add_worker(self, request: web.Request) -> web.Response:
        return await self.workers.add(await request.read())

    async def change_worker(self, request: web.Request) -> web.Response:
        return self.workers.change(request.match_info["worker_id"], await request.read())

    async def remove_worker(self, request: web.Request) -> web.Response:
        return self.workers.remove(request.match_info["worker_id"], request.query)

    @staticmethod
    def _call(request: web.Request, path: str, fields: dict[str, msgspec.Raw]) -> Call:
        headers = {**worker_headers(request), "Content-Type": "application/json"}
        return Call(path=path, fields=fields, headers=headers, request_id=request[REQUEST_ID])
