"""Chat messages to prompt text, by the model's own Jinja template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from diptych.server.errors import BadRequest


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it as a class attribute)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters, which no template wants in a prompt.
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template with the model's special tokens. Raises `jinja2.TemplateSyntaxError` when bad."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None
    ) -> None:
        """`tool_source`: another template, for conversations with tools."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self.source = source + (tool_source or "")
        """All there is, which shows how the model writes."""
        # Any use counts: templates assign to `tools` themselves when it is missing.
        parsed = [environment.parse(text) for text in (source, tool_source) if text is not None]
        names = {node.name for template in parsed for node in template.find_all(nodes.Name)}
        self.shows_tools = "tools" in names
        self.knows_effort = "reasoning_effort" in names
        self._template = environment.from_string(source)
        self._tool_template = self._template if tool_source is None else environment.from_string(tool_source)
        self._special = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt. With `continue_final_message` it ends where the last message's text ends.

        Raises `BadRequest` (param `messages`) when the template refuses the conversation."""
        variables = {
            **self._special,
            **(extra or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = (self._tool_template if tools else self._template).render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None
        if continue_final_message:
            return _up_to_final_message(text, str(messages[-1].get("content") or ""))
        return text


def _up_to_final_message(text: str, final: str) -> str:
    at = text.rfind(final.strip()) if final.strip() else -1
    if at < 0:
        raise BadRequest(
            "continue_final_message: the final message does not appear in the rendered prompt",
            param="continue_final_message",
        )
    # A template may trim a message; what it left of the trailing space is kept.
    end = at + len(final.strip())
    kept = text[end:]
    trailing = final[len(final.rstrip()) :]
    return text[:end] + (trailing if trailing and kept.startswith(trailing) else "")
