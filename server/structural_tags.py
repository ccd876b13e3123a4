"""Grammars put together from others, in xgrammar's structural-tag format: thinking before an answer, tool
calls instead of one."""

from __future__ import annotations

from typing import Any

import msgspec

from diptych.engine.wire import Grammar
from diptych.server.errors import BadRequest
from diptych.server.grammar_options import MAX_GRAMMAR_BYTES
from diptych.server.reasoning import ReasoningFormat, Thinking

Format = dict[str, Any]


class _StructuralTag(msgspec.Struct):
    format: Format


def structural_tag(form: Format, param: str | None) -> Grammar:
    """Raises `BadRequest` naming `param` for one that is too large."""
    text = msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise BadRequest(f"{param} asks for a grammar of more than {MAX_GRAMMAR_BYTES} bytes", param=param)
    return Grammar("structural_tag", text, param)


def as_format(grammar: Grammar) -> Format:
    """The same as part of a structural tag. Raises `BadRequest` for a structural tag that isn't one."""
    match grammar.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": msgspec.Raw(grammar.text.encode())}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf" | "lark":
            return {"type": "grammar", "grammar": grammar.text, "syntax": grammar.kind}
        case "structural_tag":
            try:
                return msgspec.json.decode(grammar.text, type=_StructuralTag).format
            except msgspec.DecodeError as error:
                raise BadRequest(f"{grammar.param}: {error}", param=grammar.param) from None


def either(first: Format, second: Format) -> Format:
    return {"type": "or", "elements": [first, second]}


def free_text(*, not_beginning_with: str, without: list[str]) -> Format:
    """Any text but one that begins with one of these characters or holds one of these strings."""
    beginning = {"type": "regex", "pattern": f"[^{not_beginning_with}]"}
    return {"type": "sequence", "elements": [beginning, {"type": "any_text", "excludes": without}]}


def after_thinking(grammar: Grammar, reasoning: ReasoningFormat, thinking: Thinking) -> Grammar:
    """`grammar` for the answer alone, with any thinking before it."""
    if thinking is Thinking.OVER:
        return grammar
    answer = as_format(grammar)
    start = "" if thinking.inside else reasoning.start
    thought = {"type": "tag", "begin": start, "content": {"type": "any_text"}, "end": reasoning.end}
    gap = {"type": "regex", "pattern": "\\n{0,2}"}
    form: Format = {"type": "sequence", "elements": [thought, gap, answer]}
    if thinking is Thinking.POSSIBLE:
        form = either(form, answer)
    return structural_tag(form, grammar.param)
