"""JSON out of the router."""

from __future__ import annotations

import msgspec
from aiohttp import web


def json_response(data: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(data), content_type="application/json")
