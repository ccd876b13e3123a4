"""The body of `POST /v1/responses`, and its input as chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from diptych.engine.wire import Grammar
from diptych.server.bounds import LEAST_OUTPUT, within
from diptych.server.errors import BadRequest
from diptych.server.grammar_options import grammar_option, response_format, schema_grammar
from diptych.server.requests import ABSENT, UNSUPPORTED, ChatMessage, ReasoningFields, TopLogprobs
from diptych.server.unsupported import Unsupported


class InputPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """A message of the conversation, or an item of an earlier response's `output`."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Returned as it came."""

    type: str
    schema: msgspec.Raw | UnsetType = UNSET
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """Not read: a schema is always kept."""


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """A hint, which is not taken."""


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    """What chat completions call `reasoning_effort`."""
    summary: str | None = None
    """Accepted: reasoning is shown as it is, there is no summary of it."""


LOGPROBS = "message.output_text.logprobs"

Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Only logprobs are ever there to be included."""


class ResponsesRequest(ReasoningFields, kw_only=True):
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Annotated[int, within(LEAST_OUTPUT)] | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[Includable] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    """Returned as it came."""
    chat_template_kwargs: dict[str, object] | None = None


REFUSED = Unsupported(
    {
        **UNSUPPORTED,
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        # Nothing is stored that these could refer to, and nothing runs without its client.
        "previous_response_id": (None,),
        "conversation": (None,),
        "prompt": (None,),
        "background": (None, False),
        "truncation": (None, "disabled"),
        "context_management": (None, []),
        "n": (None, 1),
    },
    instead={
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    },
)

MESSAGE_ROLES = ("system", "developer", "user", "assistant")


def messages_of(asked: ResponsesRequest) -> list[ChatMessage]:
    """Instructions and input as a chat. Raises `BadRequest` naming what isn't text."""
    messages = []
    if asked.instructions:
        messages.append(ChatMessage(role="system", content=asked.instructions))
    if isinstance(asked.input, str):
        messages.append(ChatMessage(role="user", content=asked.input))
    else:
        messages += _conversation(asked.input)
    if not asked.input:
        raise BadRequest("input is empty", param="input")
    return messages


def effort_of(asked: ResponsesRequest) -> str | None:
    return asked.reasoning.effort if asked.reasoning else None


def _conversation(items: Sequence[InputItem]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    thought: str | None = None
    for position, item in enumerate(items):
        param = f"input[{position}]"
        if item.type == "reasoning":
            # Belongs to the message after it: two items of one answer.
            thought = _joined(item.content or "", param, ("reasoning_text",))
            continue
        if item.type != "message":
            raise BadRequest(
                f"{param}: items of type {item.type[:40]!r} are not supported, only messages and reasoning",
                param=f"{param}.type",
            )
        message = _message(item, param)
        if thought and message.role == "assistant":
            message.reasoning_content = thought
        thought = None
        messages.append(message)
    return messages


def _message(item: InputItem, param: str) -> ChatMessage:
    if item.role not in MESSAGE_ROLES:
        raise BadRequest(
            f"{param}.role must be one of {', '.join(MESSAGE_ROLES)}, got {item.role!r:.40}",
            param=f"{param}.role",
        )
    if item.content is None:
        raise BadRequest(f"{param} has no content", param=f"{param}.content")
    return ChatMessage(
        role=cast("Literal['system', 'developer', 'user', 'assistant']", item.role),
        content=_joined(item.content, param, ("input_text", "output_text", "text", "refusal")),
    )


def _joined(content: str | Sequence[InputPart], param: str, kinds: Sequence[str]) -> str:
    """The text of parts of these kinds. Raises `BadRequest` naming a part of another."""
    if isinstance(content, str):
        return content
    texts = []
    for position, part in enumerate(content):
        at = f"{param}.content[{position}]"
        if part.type not in kinds:
            raise BadRequest(
                f"{at}: parts of type {part.type[:40]!r} are not supported here, only {', '.join(kinds)}",
                param=f"{at}.type",
            )
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise BadRequest(f"{at} has no text", param=f"{at}.text")
        texts.append(text)
    return "\n".join(texts)


def grammar_of(asked: ResponsesRequest) -> Grammar | None:
    """Of `text.format`, or of a field that says the same. Raises `BadRequest`, also when both are there."""
    elsewhere = grammar_option(asked)
    form = asked.text.format if asked.text else None
    if form is None:
        return elsewhere
    if form.type == "json_schema":
        grammar = schema_grammar(ABSENT if form.schema is UNSET else form.schema, "text.format.schema")
        if grammar is None:
            raise BadRequest("text.format.schema is missing", param="text.format.schema")
    elif form.type in ("text", "json_object"):
        grammar = response_format(msgspec.Raw(msgspec.json.encode({"type": form.type})), "text.format")
    else:
        raise BadRequest(
            f"text.format.type must be text, json_object or json_schema, got {form.type[:40]!r}",
            param="text.format.type",
        )
    if grammar is not None and elsewhere is not None:
        raise BadRequest(f"{elsewhere.param} can't be combined with text.format", param=elsewhere.param)
    return grammar if grammar is not None else elsewhere
