"""Each request has an id: the client's `X-Request-Id`, or a new one. Answers and log lines name it."""

from __future__ import annotations

import secrets

from aiohttp import web

HEADER = "X-Request-Id"
MAX_LENGTH = 128

REQUEST_ID = web.RequestKey("request_id", str)
"""Set by the outermost middleware, with `request_id`."""


def new_request_id() -> str:
    return secrets.token_hex(16)


def request_id(request: web.BaseRequest) -> str:
    """The client's id if it is a sane header value, else a new one."""
    given = request.headers.get(HEADER, "")
    if 0 < len(given) <= MAX_LENGTH and given.isascii() and given.isprintable():
        return given
    return new_request_id()


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: each answer names its request, streamed ones included."""
    if REQUEST_ID in request:
        response.headers[HEADER] = request[REQUEST_ID]
