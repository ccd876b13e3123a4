"""What a chat request says of tools, checked: which ones the model is shown and what its answer must be."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from diptych.engine.wire import Grammar
from diptych.server.body import convert
from diptych.server.errors import BadRequest
from diptych.server.frontend import Frontend
from diptych.server.requests import AllowedToolsChoice, ChatRequest, FunctionTool, NamedTool, Tool
from diptych.server.schema_check import problem
from diptych.server.structural_tags import as_format, either, structural_tag
from diptych.server.tools.parser import ToolParser

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Of one request that lets the model call tools."""

    shown: list[dict[str, object]]
    """What the template gets."""
    functions: dict[str, FunctionTool]
    """What it may call."""
    strict: str | None
    """The field that asks for calls to be held to their schemas, of the first of these that does."""
    parser: type[ToolParser]
    parallel: bool
    named: bool
    """The client chose the function; OpenAI's `finish_reason` is then `stop`."""
    forced: bool
    """The answer is a call: `required`, or `named`."""

    def new_parser(self) -> ToolParser:
        """For one sample."""
        return self.parser(self.functions, parallel=self.parallel and not self.named)

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """What the text must match: the calls' format if they are forced or have strict schemas, beside or
        instead of `answer`, which is what the request says of an answer that is none. Raises `BadRequest`."""
        tools = [_callable(tool) for tool in self.functions.values()]
        parallel = self.parallel and not self.named
        if self.forced:
            return structural_tag(self.parser.structure(tools, parallel=parallel), "tool_choice")
        if answer is not None:
            calls = self.parser.structure(tools, parallel=parallel)
            return structural_tag(either(calls, as_format(answer)), answer.param)
        if self.strict is None:
            return None
        form = self.parser.free_structure(tools, parallel=parallel)
        return structural_tag(form, self.strict)


def tool_use(frontend: Frontend, asked: ChatRequest) -> ToolUse | None:
    """None when the model shall not know of tools. Raises `BadRequest` naming the field."""
    functions = checked_functions(asked.tools or [])
    choice = asked.tool_choice
    if not functions:
        if choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice says what to call, but there are no tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    parser = frontend.tool_parser
    if parser is None:
        raise BadRequest(
            "how this model calls tools is not known; the worker can be told with --tool-call-parser, and "
            "with --chat-template where the model's own shows no tools",
            param="tools",
        )
    named, forced = isinstance(choice, NamedTool), choice == "required"
    chosen: list[NamedTool] | None = None
    if isinstance(choice, NamedTool):
        chosen, forced = [choice], True
        _check_names(functions, chosen, ["tool_choice"])
    elif isinstance(choice, AllowedToolsChoice):
        chosen, forced = choice.allowed_tools.tools, choice.allowed_tools.mode == "required"
        where = "tool_choice.allowed_tools.tools"
        if not chosen:
            raise BadRequest(f"{where} is empty; tool_choice: none allows no call", param=where)
        _check_names(functions, chosen, [f"{where}[{at}]" for at in range(len(chosen))])
    names = functions.keys() if chosen is None else {tool.function.name for tool in chosen}
    strict = (
        f"tools[{position}].function.strict"
        for position, tool in enumerate(functions.values())
        if tool.strict and tool.name in names
    )
    return ToolUse(
        shown=asked.tools or [],
        functions={name: tool for name, tool in functions.items() if name in names},
        strict=next(strict, None),
        parser=parser,
        parallel=asked.parallel_tool_calls is not False,
        named=named,
        forced=forced,
    )


def _check_names(functions: Collection[str], chosen: Sequence[NamedTool], params: Sequence[str]) -> None:
    for tool, param in zip(chosen, params, strict=True):
        name = tool.function.name
        if name not in functions:
            raise BadRequest(f"{param} names {name[:80]!r}, which is not in tools", param=param)


def checked_functions(tools: Sequence[Mapping[str, object]]) -> dict[str, FunctionTool]:
    """By name. Raises `BadRequest` naming the first that is no function tool."""
    functions: dict[str, FunctionTool] = {}
    for position, given in enumerate(tools):
        param = f"tools[{position}]"
        if given.get("type", "function") != "function":
            raise BadRequest(
                f"{param}.type must be function: custom tools and others that OpenAI knows are not supported",
                param=f"{param}.type",
            )
        function = convert(given, Tool, param).function
        if not _NAME.fullmatch(function.name):
            raise BadRequest(
                f"{param}.function.name must be 1 to 64 of a-z, A-Z, 0-9, _ and -",
                param=f"{param}.function.name",
            )
        if function.name in functions:
            raise BadRequest(
                f"{param}.function.name: {function.name!r} is there twice", param=f"{param}.function.name"
            )
        _check_schema(function, f"{param}.function.parameters")
        functions[function.name] = function
    return functions


def _check_schema(function: FunctionTool, param: str) -> None:
    schema = function.parameters or {}
    if schema.get("type", "object") != "object":
        raise BadRequest(f"{param} must be the JSON schema of an object", param=param)
    properties = schema.get("properties", {})
    forms = properties.values() if isinstance(properties, dict) else [None]
    if not all(isinstance(form, dict | bool) for form in forms):
        raise BadRequest(f"{param}.properties must hold JSON schemas", param=f"{param}.properties")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise BadRequest(f"{param}.required must be a list of names", param=f"{param}.required")
    # Without `strict` a schema is kept as far as it can be, as OpenAI does.
    found = problem(schema) if function.strict else None
    if found is not None:
        raise BadRequest(f"{param}: {found}, as strict asks for", param=param)


def _callable(function: FunctionTool) -> dict[str, object]:
    """For a parser's `structure`. A schema of no type would let any JSON pass."""
    parameters = {"type": "object", "properties": {}, **(function.parameters or {})}
    return {"name": function.name, "parameters": parameters}
