"""Orders to a running worker: pause and continue, and record a profile."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from aiohttp import web

from diptych.common_config import get_observability
from diptych.engine.wire import ActionReply, ContinueGeneration, PauseGeneration, StartProfile, StopProfile
from diptych.server.body import read_optional_json
from diptych.server.bounds import within
from diptych.server.errors import BadRequest, engine_error
from diptych.server.frontend import FRONTEND, Frontend
from diptych.server.scheduler_calls import MakeCall
from diptych.server.sse import json_response

ORDER_TIMEOUT = 60.0
"""Seconds for the scheduler to finish its step and answer."""
WRITE_TIMEOUT = 600.0
"""Seconds to write a trace, which can be large."""


class PauseRequest(msgspec.Struct, kw_only=True):
    mode: Literal["abort", "in_place"] = "abort"
    """What becomes of running requests: they end, or wait where they are."""


async def pause_generation(request: web.Request) -> web.Response:
    """Nothing is computed until /continue_generation. New requests are taken and wait."""
    frontend = request.app[FRONTEND]
    asked = await read_optional_json(request, PauseRequest)
    await _order(frontend, lambda call_id: PauseGeneration(call_id=call_id), ORDER_TIMEOUT)
    frontend.manager.paused = True
    aborted = frontend.manager.abort_all() if asked.mode == "abort" else 0
    return json_response({"paused": True, "aborted": aborted})


async def continue_generation(request: web.Request) -> web.Response:
    frontend = request.app[FRONTEND]
    await _order(frontend, lambda call_id: ContinueGeneration(call_id=call_id), ORDER_TIMEOUT)
    frontend.manager.paused = False
    return json_response({"paused": False})


class ProfileRequest(msgspec.Struct, kw_only=True):
    num_steps: Annotated[int, within(1)] | None = None
    """Forward steps to record; None: until /stop_profile."""
    record_shapes: bool = False
    with_stack: bool = False
    profile_prefix: str = "profile"
    """The beginning of the file's name."""
    output_dir: str | None = None


async def start_profile(request: web.Request) -> web.Response:
    """Record the scheduler. Answers the file that will hold the trace."""
    frontend = request.app[FRONTEND]
    asked = await read_optional_json(request, ProfileRequest)
    if asked.num_steps is not None and asked.num_steps < 1:
        raise BadRequest(f"num_steps must be at least 1, got {asked.num_steps}", param="num_steps")
    path = _trace_path(frontend, asked)
    reply = await _order(
        frontend,
        lambda call_id: StartProfile(
            call_id=call_id,
            path=str(path),
            num_steps=asked.num_steps,
            record_shapes=asked.record_shapes,
            with_stack=asked.with_stack,
        ),
        ORDER_TIMEOUT,
    )
    return json_response({"path": reply.message})


async def stop_profile(request: web.Request) -> web.Response:
    """Answers once the trace is written."""
    frontend = request.app[FRONTEND]
    reply = await _order(frontend, lambda call_id: StopProfile(call_id=call_id), WRITE_TIMEOUT)
    return json_response({"path": reply.message})


def _trace_path(frontend: Frontend, asked: ProfileRequest) -> Path:
    """Raises `BadRequest`. Only the operator's command line says where files may be written."""
    folder: str | None = get_observability().profile_dir
    if folder is None:
        raise BadRequest("start the worker with --profile-dir to record profiles", code="profiling_off")
    if asked.output_dir is not None:
        raise BadRequest(f"traces go to {folder} (--profile-dir)", param="output_dir")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", asked.profile_prefix):
        raise BadRequest(
            "profile_prefix must be 1 to 64 letters, digits, dots, dashes or underscores",
            param="profile_prefix",
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"{folder} (--profile-dir): {error.strerror}", code="profiling_off") from None
    moment = time.time_ns() // 1_000_000
    name = f"{asked.profile_prefix}-{frontend.kind}-{os.getpid()}-{moment}.trace.json"
    return Path(folder).resolve() / name


async def _order(frontend: Frontend, make: MakeCall, bound: float) -> ActionReply:
    """Raises an `ApiError` with the scheduler's reason when it refuses."""
    reply = await frontend.manager.calls.act(make, bound)
    if not reply.ok:
        raise engine_error(reply.message, status=reply.status, param=None)
    return reply
