"""Parts of the structural tags that formats describe their calls with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def call_tags(
    tools: Sequence[Mapping[str, object]], before: str, middle: str, end: str
) -> list[dict[str, object]]:
    """One structural tag per function: `before`, its name, `middle`, its arguments as JSON, `end`."""
    return [
        {
            "type": "tag",
            "begin": f"{before}{tool['name']}{middle}",
            "content": {"type": "json_schema", "json_schema": tool["parameters"]},
            "end": end,
        }
        for tool in tools
    ]


def one_or_more(tags: list[dict[str, object]], separator: str, *, parallel: bool) -> dict[str, object]:
    """The structural-tag format of such calls behind each other; only one without `parallel`."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
