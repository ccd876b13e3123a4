"""What happens around every request: its id, the key check, errors in one shape, counting, the log line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from diptych.common_config import get_observability, get_serving
from diptych.httpserver.access import (
    ADMIN_REFUSED,
    KEY_REFUSED,
    Refusal,
    access_of,
    own_authorization,
    refusal,
)
from diptych.httpserver.protocol import BodyTooSlow
from diptych.httpserver.request_id import HEADER, REQUEST_ID, request_id
from diptych.router.access_log import CLIENT_LEFT, log_access
from diptych.router.errors import RouterError, from_http_exception, too_large
from diptych.router.journal import JOURNAL, Journal
from diptych.router.metrics import RouterMetrics
from diptych.router.routes import KINDS

_FORWARDED = ("Authorization", "traceparent", "tracestate")


def worker_headers(request: web.Request) -> dict[str, str]:
    """Headers for a worker on behalf of this client. The router's own key stands in where the client sent
    none (on routes that need none)."""
    headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
    own = own_authorization(access_of(KINDS, request))
    if own is not None:
        headers.setdefault("Authorization", own)
    headers[HEADER] = request[REQUEST_ID]
    return headers


def check_key(request: web.Request) -> None:
    """Raises RouterError (401, 403) unless the client sent a key that this route takes, if keys are set."""
    refused = refusal(access_of(KINDS, request), request.headers.get("Authorization", ""))
    if refused is Refusal.NOT_ADMIN:
        raise RouterError(403, ADMIN_REFUSED, code="insufficient_permissions")
    if refused is Refusal.UNKNOWN:
        raise RouterError(401, KEY_REFUSED, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def check_length(request: web.Request) -> None:
    """Raises RouterError (413) when the announced body is too large: nobody waits for it."""
    announced, limit = request.content_length, get_serving().max_request_bytes
    if announced is not None and announced > limit:
        raise too_large(limit)


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        check_key(request)
        check_length(request)
        return await handler(request)
    except RouterError as error:
        request[JOURNAL].error = error.message
        return error.response()
    except BodyTooSlow as error:
        slow = RouterError(408, str(error), code="timeout").response()
        slow.force_close()
        return slow
    except web.RequestPayloadError as error:
        response = RouterError(400, f"the request body could not be read: {error}").response()
        await response.prepare(request)
        await response.write_eof()
        # Else aiohttp reads on before it sends the answer, and stumbles over the same bytes.
        request.protocol.force_close()
        return response
    except web.HTTPException as error:
        limit = get_serving().max_request_bytes
        refused = from_http_exception(error, request.method, request.path, limit)
        request[JOURNAL].error = refused.message
        return refused.response()


def make_middleware(metrics: RouterMetrics) -> Middleware:
    """The one middleware of the router."""

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        request[REQUEST_ID] = request_id(request)
        journal = request[JOURNAL] = Journal()
        response: web.StreamResponse | None = None
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
            metrics.answered(route, status)
            if journal.broken is not None:
                metrics.broken_answers.labels(route, journal.broken).inc()
            if get_observability().log_requests:
                log_access(request, route, status, journal, response)

    return middleware
