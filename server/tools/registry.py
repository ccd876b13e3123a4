"""The tool-call formats by name, and which one a chat template's source shows."""

from __future__ import annotations

from collections.abc import Mapping

from diptych.server.tools.hermes import HermesParser
from diptych.server.tools.llama3_json import Llama3JsonParser
from diptych.server.tools.mistral import MistralParser
from diptych.server.tools.parser import ToolParser
from diptych.server.tools.pythonic import PythonicParser

TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}


def detect_tool_parser(template: str) -> str | None:
    """The name of the format that a template asks its model for, or None: it has no tools, or a format that
    isn't known here (such as Qwen3-Coder's, whose calls stand between the same tags as Hermes')."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "[func_name1(" in template or "<|python_start|>" in template:
        return "pythonic"
    if "<|python_tag|>" in template or ('"parameters": dictionary' in template and "tools" in template):
        return "llama3_json"
    return None
