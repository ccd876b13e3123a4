"""`POST /update_config`: settings that may change while the worker runs, for this engine alone. The record
and the process's bags stay as they were launched."""

from __future__ import annotations

from typing import cast

from aiohttp import web

from diptych.server.body import read_json
from diptych.server.config_overlay import check_setting
from diptych.server.errors import BadRequest
from diptych.server.frontend import FRONTEND
from diptych.server.sse import json_response

CHANGEABLE = ("weight_version", "served_model_name", "log_level")
"""Leaves, so that null can bring back what was launched. Only the overlay says what they are
(`config_value`): a reader of the bag would miss a change."""

SOURCE = "POST /update_config"


async def update_config(request: web.Request) -> web.Response:
    """All of the changes or, with a 400, none. Answers what is then in effect."""
    manager = request.app[FRONTEND].manager
    asked = _checked(await read_json(request, dict[str, object]))
    if "log_level" in asked:
        level = asked["log_level"] or manager.overlay.launch_value("log_level")
        # First, because it alone can fail: a scheduler that is gone.
        manager.set_log_level(cast("str", level))
    recorded = manager.overlay.recorded()
    withdrawn = [name for name, value in asked.items() if value is None and name in recorded]
    manager.record_config_updates(SOURCE, **{n: value for n, value in asked.items() if value is not None})
    manager.withdraw_config_updates(SOURCE, *withdrawn)
    effective = manager.resolved_config_dict()
    return json_response({name: effective[name] for name in CHANGEABLE})


def _checked(asked: dict[str, object]) -> dict[str, object]:
    """Raises `BadRequest` for the first name or value that can't be."""
    for name, value in asked.items():
        if name not in CHANGEABLE:
            raise BadRequest(
                f"`{name}` can't be changed while the worker runs; {', '.join(CHANGEABLE)} can", param=name
            )
        if value is not None:
            check_setting(name, value, hint="; null undoes a change")
    return asked
