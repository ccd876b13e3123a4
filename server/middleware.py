"""Around every route: who may ask, and how errors, metrics and the request log come out."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from diptych.common_config import get_observability, get_serving
from diptych.server.errors import ApiError, MethodNotAllowed, NotFound, Unauthorized
from diptych.server.metrics import FrontendMetrics

logger = logging.getLogger(__name__)

OPEN_ROUTES = frozenset({"/health", "/metrics"})
"""Answered without a key: load balancers ask."""

CLIENT_LEFT = 499


def error_response(error: ApiError) -> web.Response:
    return web.Response(
        body=error.json(), status=error.status, headers=error.headers, content_type="application/json"
    )


@web.middleware
async def errors_to_http(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one place where errors become HTTP. What isn't an `ApiError` is a bug: logged with its trace,
    answered with a 500 that doesn't show it."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPNotFound:
        return error_response(NotFound(f"no route {request.method} {request.path}"))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return error_response(
            MethodNotAllowed(
                f"{request.path} does not answer {request.method}, but {allowed}", headers={"Allow": allowed}
            )
        )
    except (web.HTTPException, ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        # The boundary of the process: whatever broke, the client gets an answer in our shape.
        logger.exception("%s %s failed", request.method, request.path)
        return error_response(ApiError("internal error; the worker's log says more"))


@web.middleware
async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """`Authorization: Bearer KEY` on everything but `OPEN_ROUTES`, when a key is set."""
    key = get_serving().api_key
    if key is not None and request.path not in OPEN_ROUTES:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        matches = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())
        if scheme.lower() != "bearer" or not matches:
            raise Unauthorized(
                "missing or wrong API key; send `Authorization: Bearer KEY`",
                headers={"WWW-Authenticate": "Bearer"},
            )
    return await handler(request)


def observe(metrics: FrontendMetrics) -> Middleware:
    """Counts and, when asked, logs each request."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.perf_counter()
        status = CLIENT_LEFT
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "unknown"
            metrics.requests.labels(route, str(status)).inc()
            if get_observability().log_requests:
                logger.info(
                    "%s %s %d %.3f s", request.method, request.path, status, time.perf_counter() - started
                )

    return middleware
