"""Tools in Hermes' format for a chat template that knows none: in a system message, as the models that were
trained on the format are told of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from diptych.server.tools.hermes import CLOSE, OPEN

Fields = dict[str, object]

_INTRODUCTION = f"""You may call functions to help with the user's request. The functions that you have, as \
JSON, are:
<tools>
{{tools}}
</tools>

To call a function, answer with a JSON object that holds its name and arguments, between these tags:
{OPEN}
{{{{"name": <function name>, "arguments": <arguments as a JSON object>}}}}
{CLOSE}"""


def in_a_system_message(messages: Sequence[Fields], tools: Sequence[Mapping[str, object]]) -> list[Fields]:
    """The conversation with the tools in its first, system message, and with tool calls and their results as
    plain text."""
    shown = [_plain(message) for message in messages]
    if not tools:
        return shown
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=listed)
    if shown and shown[0]["role"] == "system":
        shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{introduction}"}
        return shown
    return [{"role": "system", "content": introduction}, *shown]


def _plain(message: Fields) -> Fields:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = cast("Sequence[Fields]", message.get("tool_calls", ()))
    if not calls:
        return message
    written = [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls]
    text = "\n".join(filter(None, [cast("str", message["content"]), *written]))
    return {"role": "assistant", "content": text}
