"""`POST /update_weights_from_disk`: other weights of the same model, without a restart."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from diptych.engine.wire import UpdateWeights
from diptych.server.body import read_json
from diptych.server.config_overlay import check_setting
from diptych.server.errors import BadRequest, DeadlineExceeded, Unavailable, engine_error
from diptych.server.frontend import FRONTEND
from diptych.server.sse import json_response

SOURCE = "POST /update_weights_from_disk"

ABORT_TIMEOUT = 30.0
"""Seconds that aborted requests get to end."""
LOAD_TIMEOUT = 3600.0
"""Seconds to load the weights of any model that fits one machine."""
IDENTITY_LENGTH = 12


class UpdateWeightsRequest(msgspec.Struct, kw_only=True):
    model_path: str
    """As for --model-path."""
    load_format: str | None = None
    weight_version: str | None = None
    """None: the beginning of the weights' identity."""
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None


async def update_weights(request: web.Request) -> web.Response:
    """Answers once the new weights serve, or, with an error, the old ones still do."""
    frontend = request.app[FRONTEND]
    manager = frontend.manager
    asked = await read_json(request, UpdateWeightsRequest)
    if asked.flush_cache is False:
        raise BadRequest(
            "`flush_cache`: what the old weights computed is of no use to the new", param="flush_cache"
        )
    if asked.load_format is not None:
        check_setting("load_format", asked.load_format)
    if asked.weight_version is not None:
        check_setting("weight_version", asked.weight_version)
    manager.check_admission()
    load_format = asked.load_format or str(manager.config_value("load_format"))
    model_dir = await asyncio.to_thread(frontend.find_weights, asked.model_path, load_format)
    # Checked again: another update may have begun while this one looked for its files.
    manager.check_admission()
    manager.held = Unavailable("the weights are being replaced", headers={"Retry-After": "1"})
    try:
        if asked.abort_all_requests:
            manager.abort_all()
            try:
                async with asyncio.timeout(ABORT_TIMEOUT):
                    await manager.wait_idle()
            except TimeoutError:
                raise DeadlineExceeded(f"requests have not ended within {ABORT_TIMEOUT:g} s") from None
        reply = await manager.calls.act(
            lambda call_id: UpdateWeights(call_id=call_id, model_dir=str(model_dir), load_format=load_format),
            LOAD_TIMEOUT,
        )
    finally:
        manager.held = None
    if not reply.ok:
        raise engine_error(reply.message, status=reply.status, param="model_path")
    identity = reply.message
    version = asked.weight_version or identity[:IDENTITY_LENGTH]
    manager.record_config_updates(SOURCE, model_path=asked.model_path, weight_version=version)
    return json_response(
        {
            "success": True,
            "message": f"serving the weights {identity} of {asked.model_path}",
            "weight_version": version,
            "num_paused_requests": 0,
        }
    )
