"""`/faults`: what goes wrong on purpose. The routes exist only with `--enable-fault-injection`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from diptych.engine.faults import FaultChange
from diptych.server.body import read_json
from diptych.server.errors import BadRequest
from diptych.server.frontend import FRONTEND
from diptych.server.sse import json_response

FAULTS_TIMEOUT = 30.0
"""Seconds for the scheduler to finish its step and answer."""


async def show_faults(request: web.Request) -> web.Response:
    """The rules with their counts, and what is held now."""
    return await _answer(request, None)


async def change_faults(request: web.Request) -> web.Response:
    """The whole change or, with a 400, none of it. Answers what is then in effect."""
    change = await read_json(request, FaultChange)
    problem = change.problem()
    if problem is not None:
        field, what = problem
        raise BadRequest(f"`{field}`: {what}", param=field)
    return await _answer(request, change)


async def _answer(request: web.Request, change: FaultChange | None) -> web.Response:
    reply = await request.app[FRONTEND].manager.calls.faults(change, FAULTS_TIMEOUT)
    return json_response(msgspec.to_builtins(reply.report))
