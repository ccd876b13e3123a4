"""Routes that say what this worker is and does: models, server and model info, load, metrics."""

from __future__ import annotations

import importlib.metadata

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from diptych.common_config import get_parallel, get_serving, readback
from diptych.server.errors import ApiError, ModelNotFound
from diptych.server.frontend import FRONTEND, Frontend
from diptych.server.sse import json_response

STATE_TIMEOUT = 5.0
"""Seconds a busy scheduler gets to answer; a step of a large batch takes well under that."""


def _model_object(frontend: Frontend) -> dict[str, object]:
    model = frontend.model
    return {
        "id": frontend.served_name,
        "object": "model",
        "created": frontend.created,
        "owned_by": "diptych",
        "root": frontend.model_path,
        "max_model_len": model.limits.context_length,
    }


async def models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_model_object(request.app[FRONTEND])]})


async def model(request: web.Request) -> web.Response:
    frontend = request.app[FRONTEND]
    name = request.match_info["name"]
    if name != frontend.served_name:
        raise ModelNotFound(f"the model {name!r} is not served here", param="model")
    return json_response(_model_object(frontend))


async def model_info(request: web.Request) -> web.Response:
    frontend = request.app[FRONTEND]
    facts = frontend.model
    return json_response(
        {
            "model_path": frontend.model_path,
            "tokenizer_path": facts.tokenizer_path,
            "served_model_name": frontend.served_name,
            "weight_version": frontend.weight_version,
            "model_type": facts.model_type,
            "architectures": facts.architectures,
            "is_generation": True,
            "context_length": facts.limits.context_length,
            "vocab_size": facts.limits.vocab_size,
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """The record with provenance, the effective bags of both processes, and this engine's overlay. The flat
    fields at the top are those that routers read."""
    frontend = request.app[FRONTEND]
    manager = frontend.manager
    state = await manager.calls.state(STATE_TIMEOUT)
    # The record is the same in both processes; it is shown once.
    own = dict(readback())
    record, provenance = own.pop("record"), own.pop("provenance")
    scheduler = {name: value for name, value in state.config.items() if name not in ("record", "provenance")}
    facts = frontend.model
    return json_response(
        {
            "version": importlib.metadata.version("diptych"),
            "disaggregation_mode": "null" if frontend.kind == "colocated" else frontend.kind.value,
            "disaggregation_bootstrap_port": frontend.bootstrap_port,
            "model_path": frontend.model_path,
            "tokenizer_path": facts.tokenizer_path,
            "served_model_name": frontend.served_name,
            "weight_version": frontend.weight_version,
            "model_type": facts.model_type,
            "architectures": facts.architectures,
            "dp_size": get_parallel().dp_size,
            "tool_call_parser": _detected(manager.config_value("tool_call_parser")),
            "reasoning_parser": _detected(manager.config_value("reasoning_parser")),
            "max_total_num_tokens": facts.max_total_tokens,
            "context_length": facts.limits.context_length,
            "vocab_size": facts.limits.vocab_size,
            "max_request_bytes": get_serving().max_request_bytes,
            "status": "draining" if manager.draining else "paused" if manager.paused else "ready",
            "load": state.load,
            "record": record,
            "provenance": provenance,
            "frontend": own,
            "scheduler": scheduler,
            "engine_overlay": manager.overlay.readback(),
        }
    )


def _detected(parser: object) -> object:
    """What is left open when the worker serves was not found in the chat template."""
    return "none" if parser == "auto" else parser


async def load(request: web.Request) -> web.Response:
    state = await request.app[FRONTEND].manager.calls.state(STATE_TIMEOUT)
    waiting = state.load.get("num_waiting_reqs", 0)
    return json_response(
        [
            {
                "dp_rank": 0,
                "num_reqs": state.load.get("num_running_reqs", 0) + waiting,
                "num_waiting_reqs": waiting,
                "num_tokens": state.load.get("num_used_tokens", 0),
            }
        ]
    )


async def metrics(request: web.Request) -> web.Response:
    """This process's metrics and the scheduler's; without the latter when it doesn't answer, which is the
    moment when the former matter."""
    manager = request.app[FRONTEND].manager
    try:
        scheduler = (await manager.calls.state(STATE_TIMEOUT)).metrics
    except ApiError as error:
        scheduler = f"# the scheduler's metrics are missing: {error.message}\n"
    response = web.Response(body=(manager.metrics.text() + scheduler).encode())
    response.headers["Content-Type"] = CONTENT_TYPE_LATEST
    return response
