"""The bootstrap service of a prefill worker: ranks register, decode workers look up. With cluster keys it
takes and gives routes only signed."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from diptych.kvtransfer.bootstrap.route import RankAddress, RankRoute, Route
from diptych.kvtransfer.bootstrap.signing import (
    CHALLENGE,
    MAC_HEADER,
    NONCE_CHARS,
    NONCE_HEADER,
    answer_mac,
    request_mac,
    same,
)
from diptych.kvtransfer.cluster import ClusterKeys, Refusals
from diptych.kvtransfer.wire import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 1 << 20
_ROUTE = "/route"


class RouteTable:
    """The ranks of the latest worker start. Ready once every distinct rank of it has registered."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankRoute] = {}

    def put(self, rank: RankRoute) -> str | None:
        """Store a registration; the reason if it contradicts the ranks that are there."""
        known = next(iter(self._ranks.values()), None)
        if known is not None and known.worker_id != rank.worker_id:
            self._ranks.clear()
        elif known is not None:
            if known.world_size != rank.world_size:
                return f"world_size: {rank.world_size}, but {known.world_size} at rank {known.rank}"
            if known.fingerprint != rank.fingerprint or known.backend != rank.backend:
                return f"fingerprint: differs from rank {known.rank}'s"
        self._ranks[rank.rank] = rank
        return None

    def missing(self) -> str | None:
        """Why there is no route yet, or None."""
        if not self._ranks:
            return "no rank has registered yet"
        world_size = next(iter(self._ranks.values())).world_size
        if len(self._ranks) < world_size:
            return f"{len(self._ranks)} of {world_size} ranks have registered"
        return None

    def route(self) -> Route:
        """Only when nothing is missing."""
        ranks = [self._ranks[index] for index in sorted(self._ranks)]
        return Route(
            version=PROTOCOL_VERSION,
            worker_id=ranks[0].worker_id,
            fingerprint=ranks[0].fingerprint,
            backend=ranks[0].backend,
            ranks=[
                RankAddress(rank=r.rank, identity=r.identity, control_address=r.control_address)
                for r in ranks
            ],
            published=ranks[0].published,
        )


_TABLE = web.AppKey("table", RouteTable)


def _json(payload: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(payload), status=status, content_type="application/json")


async def _put_route(request: web.Request) -> web.Response:
    try:
        rank = msgspec.json.decode(await request.read(), type=RankRoute)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return _json({"error": str(error)}, 400)
    if rank.version != PROTOCOL_VERSION:
        return _json({"error": f"version: {rank.version}, but {PROTOCOL_VERSION} here"}, 400)
    problem = rank.problem()
    if problem is not None:
        return _json({"error": problem}, 400)
    conflict = request.app[_TABLE].put(rank)
    if conflict is not None:
        return _json({"error": conflict}, 409)
    return _json({"status": "ok"})


async def _get_route(request: web.Request) -> web.Response:
    table = request.app[_TABLE]
    missing = table.missing()
    if missing is not None:
        return _json({"error": missing}, 503)
    return _json(table.route())


async def _health(request: web.Request) -> web.Response:
    missing = request.app[_TABLE].missing()
    return _json({"status": missing or "ok"}, 503 if missing else 200)


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except TimeoutError as error:
        # The server that this application runs in has a bound on how long a body may take.
        slow = _json({"error": str(error)}, 408)
        slow.force_close()
        return slow
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _json({"error": error.reason}, error.status)


def _signed(keys: ClusterKeys, challenge: str, refusals: Refusals) -> Middleware:
    """Routes are for who has the secret, and go to nobody else."""
    registered: set[str] = set()
    """Nonces of registrations. Only the cluster's own can make it grow."""

    @web.middleware
    async def middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path != _ROUTE:
            return await handler(request)
        nonce, mac = request.headers.get(NONCE_HEADER, ""), request.headers.get(MAC_HEADER, "")
        body = await request.read()
        expected = request_mac(keys.signing, challenge, nonce, request.method, request.path, body)
        if not same(mac, expected) or len(nonce) != NONCE_CHARS or nonce in registered:
            why = (
                "another --cluster-secret, or a challenge of an earlier start"
                if mac
                else "no --cluster-secret"
            )
            refusals.add(f"{request.method} {_ROUTE} from {request.remote}: {why}")
            return _json({"error": f"the request does not prove the cluster secret: {why}"}, 401)
        if request.method == "PUT":
            registered.add(nonce)
        answer = await handler(request)
        assert isinstance(answer, web.Response)
        assert isinstance(answer.body, bytes)
        answer.headers[MAC_HEADER] = answer_mac(keys.signing, nonce, answer.status, answer.body)
        return answer

    return middleware


def make_bootstrap_app(
    keys: ClusterKeys | None = None, refused: Callable[[], None] = lambda: None
) -> web.Application:
    """Routes `PUT /route`, `GET /route`, `GET /health`, and with `keys` `GET /challenge`. Bad input gets a
    4xx with `{"error": reason}`. `refused` is called for each request that had to be signed and wasn't."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_json])
    app[_TABLE] = RouteTable()
    app.router.add_put(_ROUTE, _put_route)
    app.router.add_get(_ROUTE, _get_route)
    app.router.add_get("/health", _health)
    if keys is not None:
        challenge = secrets.token_hex(NONCE_CHARS // 2)

        async def show_challenge(_: web.Request) -> web.Response:
            return _json({"challenge": challenge})

        app.router.add_get(CHALLENGE, show_challenge)
        refusals = Refusals("a request to the bootstrap service was", logger, refused)
        app.middlewares.append(_signed(keys, challenge, refusals))
    return app
