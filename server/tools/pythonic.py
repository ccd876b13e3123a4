"""Calls as a Python list, of Llama 3.2 and 4: `[f(a=1), g(b="x")]`, perhaps behind a special token."""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import cast

from diptych.server.structural_tags import either, free_text
from diptych.server.tools.call_grammar import one_or_more
from diptych.server.tools.json_calls import dumps
from diptych.server.tools.json_scanner import MAX_DEPTH, Malformed
from diptych.server.tools.parser import SPACE, Steps, ToolParser

START, END, TAG = "<|python_start|>", "<|python_end|>", "<|python_tag|>"
_NAMES = {"true": True, "false": False, "null": None}
"""JSON's literals, which models mix in."""


class PythonicParser(ToolParser):
    """A call's arguments are rewritten as JSON, so each call comes as a whole. Without a token, calls stand
    at the beginning of the text only."""

    openers = re.compile(r"[<\[]")
    markers = (START, END, TAG)

    @classmethod
    def structure(cls, tools: Sequence[Mapping[str, object]], *, parallel: bool) -> dict[str, object]:
        tags: list[dict[str, object]] = [
            {
                "type": "tag",
                "begin": f"{tool['name']}(",
                "content": _keyword_format(tool["parameters"]),
                "end": ")",
            }
            for tool in tools
        ]
        calls = one_or_more(tags, ", ", parallel=parallel)
        return {"type": "tag", "begin": "[", "content": calls, "end": "]"}

    @classmethod
    def free_structure(cls, tools: Sequence[Mapping[str, object]], *, parallel: bool) -> dict[str, object]:
        free = free_text(not_beginning_with=r"\s\[", without=[START, TAG])
        return either(cls.structure(tools, parallel=parallel), free)

    def _may_open(self, char: str) -> bool:
        return char == "<" or (char == "[" and self._blank)

    def _section(self, first: str) -> Steps[None]:
        char = first
        if char == "<":
            yield from self._literal((START, TAG), char)
            char = yield from self._visible()
        if char != "[":
            raise Malformed
        char = yield from self._visible()
        if char == "]":
            raise Malformed
        while char != "]":
            yield from self._python_call(char)
            char = yield from self._visible()
            if char == ",":
                char = yield from self._visible()
            elif char != "]":
                raise Malformed
        self._accept()
        yield from self._literal((END,), (yield from self._visible()))
        self._accept()

    def _python_call(self, first: str) -> Steps[None]:
        name, char = "", first
        while char not in SPACE + "(":
            name += char
            char = yield from self._next()
        self._known(name)
        if char != "(" and (yield from self._visible()) != "(":
            raise Malformed
        self._call(name, _as_json((yield from self._keywords())))

    def _keywords(self) -> Steps[dict[str, str]]:
        """From behind `(` to its `)`: the arguments' names, which needn't be names in Python (`from` isn't),
        and the source of their values."""
        found: dict[str, str] = {}
        char = yield from self._visible()
        while char != ")":
            name = ""
            while char != "=":
                if char in "\"'([{)]},":
                    raise Malformed
                name += char
                char = yield from self._next()
            found[name.strip(SPACE)], char = yield from self._source()
            if char == ",":
                char = yield from self._visible()
        return found

    def _source(self) -> Steps[tuple[str, str]]:
        """An expression, and the `,` or `)` behind it."""
        text, depth, quote = "", 0, ""
        while True:
            char = yield from self._next()
            if quote:
                if char == "\\":
                    text += char
                    char = yield from self._next()
                elif char == quote:
                    quote = ""
            elif char in "\"'":
                quote = char
            elif not depth and char in ",)":
                return text, char
            elif char in "([{":
                depth += 1
                if depth > MAX_DEPTH:
                    raise Malformed
            elif char in ")]}":
                depth -= 1
                if depth < 0:
                    raise Malformed
            text += char


def _as_json(arguments: Mapping[str, str]) -> str:
    """Names and values in Python to a JSON object. Raises `Malformed`."""
    try:
        return dumps({name: _evaluated(source) for name, source in arguments.items()})
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None


def _evaluated(source: str) -> object:
    with warnings.catch_warnings(action="ignore"):  # such as for "\d"
        return _literal_value(ast.parse(source.strip(), mode="eval").body)


def _literal_value(node: ast.expr) -> object:
    """What JSON can say. Raises `Malformed` for anything else."""
    match node:
        case ast.Constant(value=None | bool() | str() | int()):
            return node.value
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return number
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal_value(value) for key, value in zip(keys, values, strict=True)}
    raise Malformed


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise Malformed


def _keyword_format(parameters: object) -> dict[str, object]:
    """`a=…, b=…` in the schema's order, values as JSON; properties that aren't required may be left out."""
    schema = cast("Mapping[str, object]", parameters)
    properties = cast("Mapping[str, object]", schema.get("properties") or {})
    required = cast("Sequence[str]", schema.get("required") or ())
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    items = [_sequence(_text(f"{name}="), _value_of(form, shared)) for name, form in properties.items()]
    behind: list[dict[str, object]] = []
    for name, item in zip(properties, items, strict=True):
        following = _sequence(_text(", "), item)
        behind.append(following if name in required else {"type": "optional", "content": following})
    beginnings: list[dict[str, object]] = []
    for position, name in enumerate(properties):
        beginnings.append(_sequence(items[position], *behind[position + 1 :]))
        if name in required:
            return _one_of(beginnings)
    return _one_of([*beginnings, _text("")])


def _one_of(elements: list[dict[str, object]]) -> dict[str, object]:
    return {"type": "or", "elements": elements}


def _value_of(form: object, shared: Mapping[str, object]) -> dict[str, object]:
    if isinstance(form, Mapping):
        form = {**shared, **form}
    return {"type": "json_schema", "json_schema": form}


def _text(value: str) -> dict[str, object]:
    return {"type": "const_string", "value": value}


def _sequence(*elements: dict[str, object]) -> dict[str, object]:
    return {"type": "sequence", "elements": list(elements)}
