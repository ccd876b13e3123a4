"""The aiohttp application of a worker."""

from __future__ import annotations

from aiohttp import web

from diptych.common_config import get_serving
from diptych.httpserver.request_id import add_request_id
from diptych.server import control, faults, info, native
from diptych.server.chat import chat_completions
from diptych.server.completions import completions
from diptych.server.frontend import FRONTEND, Frontend
from diptych.server.generate import generate
from diptych.server.middleware import errors_to_http, observe, require_key
from diptych.server.responses import responses
from diptych.server.update_config import update_config
from diptych.server.weights import update_weights


def make_app(frontend: Frontend) -> web.Application:
    """Every route of a worker. Serve it with `httpserver.listen`."""
    app = web.Application(
        middlewares=[observe(frontend.manager.metrics), errors_to_http, require_key],
        client_max_size=get_serving().max_request_bytes,
    )
    app.on_response_prepare.append(add_request_id)
    app[FRONTEND] = frontend
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/v1/responses", responses),
            web.post("/generate", generate),
            web.get("/v1/models", info.models),
            web.get("/v1/models/{name:.+}", info.model),
            web.get("/health", control.health),
            web.get("/health_generate", control.health_generate),
            web.get("/server_info", info.server_info),
            web.get("/get_server_info", info.server_info),
            web.get("/model_info", info.model_info),
            web.get("/get_model_info", info.model_info),
            web.get("/get_load", info.load),
            web.get("/metrics", info.metrics),
            web.get("/flush_cache", control.flush_cache),
            web.post("/flush_cache", control.flush_cache),
            web.post("/abort_request", control.abort_request),
            web.post("/update_config", update_config),
            web.post("/update_weights_from_disk", update_weights),
            web.post("/pause_generation", native.pause_generation),
            web.post("/continue_generation", native.continue_generation),
            web.post("/start_profile", native.start_profile),
            web.post("/stop_profile", native.stop_profile),
            web.post("/tokenize", control.tokenize),
            web.post("/detokenize", control.detokenize),
        ]
    )
    if frontend.fault_injection:
        app.add_routes([web.get("/faults", faults.show_faults), web.post("/faults", faults.change_faults)])
    return app
