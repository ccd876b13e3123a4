"""From a conversation to the prompt text, by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from diptych.server.errors import BadRequest
from diptych.server.frontend import Frontend
from diptych.server.requests import ChatMessage, MadeCall
from diptych.server.tools.hermes_prompt import in_a_system_message

Fields = dict[str, object]


def render_chat(
    frontend: Frontend,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, object]] = (),
    extra: Mapping[str, object] | None = None,
) -> str:
    """Messages to prompt text. Raises `BadRequest` naming the message at fault, or `tools` where the template
    can't show any."""
    if not messages:
        raise BadRequest("messages is empty", param="messages")
    template = frontend.require_chat_template()
    given = [_template_message(message, position) for position, message in enumerate(messages)]
    calls = next((position for position, message in enumerate(messages) if message.tool_calls), None)
    if not template.shows_tools and (tools or calls is not None):
        if frontend.manager.config_value("tool_call_parser") != "hermes":
            raise BadRequest(
                "the model's chat template shows no tools and no tool calls; the worker can be started with "
                "another one (--chat-template), or with --tool-call-parser hermes, which shows them in a "
                "system message",
                param="tools" if tools else f"messages[{calls}].tool_calls",
            )
        given, tools = in_a_system_message(given, tools), ()
    return template.render(
        given,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        # Templates ask whether there are tools, some by comparing with nothing.
        tools=tools or None,
        extra=extra,
    )


def template_variables(
    frontend: Frontend, given: Mapping[str, object] | None, effort: str | None, param: str
) -> Fields:
    """What the client sets for the template, `effort` (of thinking) included. Raises `BadRequest` naming
    `param` where the model knows none."""
    if effort is None:
        return dict(given or {})
    if not frontend.require_chat_template().knows_effort:
        raise BadRequest(f"this model knows no {param}", param=param)
    return {**(given or {}), "reasoning_effort": effort}


def text_of(message: ChatMessage) -> str:
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content)
    return message.content or ""


def _template_message(message: ChatMessage, position: int) -> Fields:
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise BadRequest("the message has no content", param=f"messages[{position}].content")
    if message.tool_calls and message.role != "assistant":
        raise BadRequest("only the assistant makes tool calls", param=f"messages[{position}].tool_calls")
    optional: Fields = {
        "name": message.name,
        "tool_calls": [_template_call(call) for call in message.tool_calls or ()] or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    return {
        # OpenAI's newer name; templates know the older one.
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message),
        **{name: value for name, value in optional.items() if value is not None},
    }


def _template_call(call: MadeCall) -> Fields:
    """Templates want the arguments as an object, clients send text."""
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        arguments = _object(arguments)
    fields: Fields = {"type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
    return fields if call.id is None else {"id": call.id, **fields}


def _object(text: str) -> str | dict[str, object]:
    """What a model wrote instead of a JSON object stays as it is."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return text
