"""Mistral's formats: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]` and, newer, one
`[TOOL_CALLS]name[ARGS]{…}` per call, in between with `[CALL_ID]id` before the arguments."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

from diptych.server.tools.call_grammar import call_tags, one_or_more
from diptych.server.tools.json_calls import JsonCallParser
from diptych.server.tools.json_scanner import Malformed
from diptych.server.tools.parser import SPACE, Steps

CALLS, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(JsonCallParser):
    """Both formats; the call's own id is not kept, as it says nothing."""

    openers = re.compile(r"\[")
    markers = (CALLS, ID, ARGS)

    @classmethod
    def structure(cls, tools: Sequence[Mapping[str, object]], *, parallel: bool) -> dict[str, object]:
        tags = call_tags(tools, '{"name": "', '", "arguments": ', "}")
        calls = one_or_more(tags, ", ", parallel=parallel)
        return {"type": "tag", "begin": f"{CALLS}[", "content": calls, "end": "]"}

    @classmethod
    def free_structure(cls, tools: Sequence[Mapping[str, object]], *, parallel: bool) -> dict[str, object]:
        calls = cls.structure(tools, parallel=parallel)
        return {"type": "triggered_tags", "triggers": [CALLS], "tags": [calls], "stop_after_first": True}

    def _new_id(self) -> str:
        # Mistral's templates refuse a conversation with ids of another form.
        return secrets.token_hex(5)[:9]

    def _section(self, first: str) -> Steps[None]:
        yield from self._literal((CALLS,), first)
        char = yield from self._visible()
        if char == "[":
            yield from self._json_calls(char)
        else:
            yield from self._named(char)

    def _named(self, first: str) -> Steps[None]:
        name, char = "", first
        while char not in SPACE + "[{":
            name += char
            char = yield from self._next()
        self._known(name)
        if char == "[" and (yield from self._literal((ID, ARGS), char)) == ID:
            while (char := (yield from self._next())) != "[":
                if not char.isalnum():
                    raise Malformed
            yield from self._literal((ARGS,), char)
        if char != "{" and (yield from self._visible()) != "{":
            raise Malformed
        yield from self._stream(name)
