"""Llama 3's JSON format: `{"name": …, "parameters": {…}}`, several separated by `;`, perhaps behind
`<|python_tag|>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from diptych.server.structural_tags import either, free_text
from diptych.server.tools.call_grammar import call_tags, one_or_more
from diptych.server.tools.json_calls import JsonCallParser
from diptych.server.tools.json_scanner import Malformed
from diptych.server.tools.parser import Steps

TAG = "<|python_tag|>"


class Llama3JsonParser(JsonCallParser):
    """Without the tag calls stand at the beginning of the text only: JSON within an answer is content."""

    openers = re.compile(r"[<{]")
    markers = (TAG,)

    @classmethod
    def structure(cls, tools: Sequence[Mapping[str, object]], *, parallel: bool) -> dict[str, object]:
        return one_or_more(call_tags(tools, '{"name": "', '", "parameters": ', "}"), "; ", parallel=parallel)

    @classmethod
    def free_structure(cls, tools: Sequence[Mapping[str, object]], *, parallel: bool) -> dict[str, object]:
        free = free_text(not_beginning_with=r"\s{", without=[TAG])
        return either(cls.structure(tools, parallel=parallel), free)

    def _may_open(self, char: str) -> bool:
        return char == "<" or (char == "{" and self._blank)

    def _section(self, first: str) -> Steps[None]:
        char = first
        while True:
            if char == "<":
                yield from self._literal((TAG,), char)
                char = yield from self._visible()
            if char != "{":
                raise Malformed
            yield from self._json_call()
            char = yield from self._visible()
            if char == ";":
                char = yield from self._visible()
