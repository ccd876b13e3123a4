"""Hermes' format, also that of Qwen 2.5 and 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from diptych.server.tools.call_grammar import call_tags, one_or_more
from diptych.server.tools.json_calls import JsonCallParser
from diptych.server.tools.parser import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    """Calls may stand anywhere in the text, each between its tags; a missing closing tag does no harm, nor
    does a list of calls between them."""

    openers = re.compile("<")
    markers = (OPEN, CLOSE)
    closing = CLOSE

    @classmethod
    def structure(cls, tools: Sequence[Mapping[str, object]], *, parallel: bool) -> dict[str, object]:
        return one_or_more(_tags(tools), "\n", parallel=parallel)

    @classmethod
    def free_structure(cls, tools: Sequence[Mapping[str, object]], *, parallel: bool) -> dict[str, object]:
        return {
            "type": "triggered_tags",
            "triggers": [OPEN],
            "tags": _tags(tools),
            "stop_after_first": not parallel,
        }

    def _section(self, first: str) -> Steps[None]:
        found = yield from self._literal((OPEN,), first)
        while found == OPEN:
            yield from self._json_calls((yield from self._visible()))
            found = yield from self._literal((CLOSE, OPEN), (yield from self._visible()))
        self._accept()


def _tags(tools: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    return call_tags(tools, f'{OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{CLOSE}")
