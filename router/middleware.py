"""What happens around every request: its id, the key check, errors in one shape, counting, the log line."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from diptych.common_config import get_observability, get_serving
from diptych.router.errors import RouterError, from_http_exception
from diptych.router.metrics import RouterMetrics

access_logger = logging.getLogger("diptych.router.access")

OPEN_ROUTES = frozenset({"/health", "/metrics"})
"""Probes and scrapers carry no key."""

CLIENT_LEFT = 499

REQUEST_ID = web.RequestKey("request_id", str)

_FORWARDED = ("Authorization", "traceparent", "tracestate")


def request_id(request: web.Request) -> str:
    """The client's X-Request-Id if it is a sane header value, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def worker_headers(request: web.Request) -> dict[str, str]:
    """Headers for a worker on behalf of this client. The router's own key stands in where the client sent
    none (on routes that need none)."""
    headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
    key = get_serving().api_key
    if key is not None:
        headers.setdefault("Authorization", f"Bearer {key}")
    headers["X-Request-Id"] = request[REQUEST_ID]
    return headers


def check_key(request: web.Request) -> None:
    """Raises RouterError (401) unless the client sent the key that is set, if one is."""
    key = get_serving().api_key
    if key is None or request.path in OPEN_ROUTES:
        return
    given = request.headers.get("Authorization", "")
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {key}".encode()):
        raise RouterError(401, "the API key is missing or wrong", code="invalid_api_key")


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        check_key(request)
        return await handler(request)
    except RouterError as error:
        return error.response()
    except web.RequestPayloadError as error:
        response = RouterError(400, f"the request body could not be read: {error}").response()
        await response.prepare(request)
        await response.write_eof()
        # Else aiohttp reads on before it sends the answer, and stumbles over the same bytes.
        request.protocol.force_close()
        return response
    except web.HTTPException as error:
        limit = get_serving().max_request_bytes
        return from_http_exception(error, request.method, request.path, limit).response()


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: each answer names its request, streamed ones included."""
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]


def make_middleware(metrics: RouterMetrics) -> Middleware:
    """The one middleware of the router."""

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        request[REQUEST_ID] = request_id(request)
        started = time.monotonic()
        status = 500
        try:
            response = await _answer(request, handler)
            status = response.status
            return response
        except (asyncio.CancelledError, ConnectionResetError):
            status = CLIENT_LEFT
            raise
        finally:
            resource = request.match_info.route.resource
            # A path from outside must not become a label: that would grow without bound.
            route = resource.canonical if resource is not None else "unknown"
            metrics.requests.labels(route, str(status)).inc()
            if get_observability().log_requests:
                line = {
                    "request_id": request[REQUEST_ID],
                    "method": request.method,
                    "path": request.path,
                    "status": status,
                    "seconds": round(time.monotonic() - started, 6),
                    "client": request.remote,
                }
                access_logger.info(msgspec.json.encode(line).decode())

    return middleware
