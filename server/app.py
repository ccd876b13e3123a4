"""The aiohttp application of a worker."""

from __future__ import annotations

from aiohttp import web

from diptych.common_config import get_serving
from diptych.httpserver.endpoints import DOCUMENT, add_route
from diptych.httpserver.openapi import document_handler
from diptych.httpserver.request_id import add_request_id
from diptych.server.frontend import FRONTEND, Frontend
from diptych.server.middleware import errors_to_http, observe, require_key
from diptych.server.routes import FAULT_ROUTES, ROUTES


def make_app(frontend: Frontend) -> web.Application:
    """Every route of a worker. Serve it with `httpserver.listen`."""
    app = web.Application(
        middlewares=[observe(frontend.manager.metrics), errors_to_http, require_key],
        client_max_size=get_serving().max_request_bytes,
    )
    app.on_response_prepare.append(add_request_id)
    app[FRONTEND] = frontend
    routes = [*ROUTES, *(FAULT_ROUTES if frontend.fault_injection else ())]
    for endpoint, handler in routes:
        add_route(app, endpoint, handler)
    described = [*(endpoint for endpoint, _ in routes), DOCUMENT]
    add_route(app, DOCUMENT, document_handler(f"Diptych {frontend.kind} worker", described))
    return app
