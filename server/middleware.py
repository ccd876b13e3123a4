"""Around every route: who may ask, and how errors, metrics and the request log come out."""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from diptych.common_config import get_observability
from diptych.httpserver.access import ADMIN_REFUSED, KEY_REFUSED, Refusal, access_of, refusal
from diptych.httpserver.endpoints import kinds
from diptych.httpserver.protocol import BodyTooSlow
from diptych.httpserver.request_id import REQUEST_ID, request_id
from diptych.server.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    MethodNotAllowed,
    NotFound,
    RequestTimeout,
    Unauthorized,
)
from diptych.server.metrics import FrontendMetrics
from diptych.server.routes import FAULT_ROUTES, ROUTES

logger = logging.getLogger(__name__)

KINDS = kinds(endpoint for endpoint, _ in (*ROUTES, *FAULT_ROUTES))
"""Who may use which route."""

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
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return error_response(BadRequest(error.reason, status=error.status))
    except BodyTooSlow as error:
        response = error_response(RequestTimeout(str(error)))
        response.force_close()
        return response
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        # The boundary of the process: whatever broke, the client gets an answer in our shape.
        logger.exception("%s %s failed", request.method, request.path)
        return error_response(ApiError("internal error; the worker's log says more"))


@web.middleware
async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Each route takes the keys of its kind, when keys are set."""
    refused = refusal(access_of(KINDS, request), request.headers.get("Authorization", ""))
    if refused is Refusal.NOT_ADMIN:
        raise Forbidden(ADMIN_REFUSED)
    if refused is Refusal.UNKNOWN:
        raise Unauthorized(KEY_REFUSED, headers={"WWW-Authenticate": "Bearer"})
    return await handler(request)


def observe(metrics: FrontendMetrics) -> Middleware:
    """Counts and, when asked, logs each request."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = request_id(request)
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
                seconds, path = time.perf_counter() - started, request.rel_url.raw_path
                logger.info(
                    "%s %s %d %.3f s id=%s", request.method, path, status, seconds, request[REQUEST_ID]
                )

    return middleware
