"""What is changed in a structural tag before it is compiled."""

from __future__ import annotations

import json
from typing import Any


def with_little_whitespace(text: str) -> str:
    """Its JSON schemas allow one white space character between elements: fewer the library can't have there.
    What isn't a structural tag stays as it is. Raises ValueError."""
    try:
        tag = json.loads(text)
    except RecursionError:
        return text
    formats: list[Any] = [tag]
    while formats:
        form = formats.pop()
        if isinstance(form, dict):
            if form.get("type") == "json_schema":
                form["max_whitespace_cnt"] = 1
            formats += [part for name, part in form.items() if name != "json_schema"]
        elif isinstance(form, list):
            formats += form
    return json.dumps(tag, ensure_ascii=False, allow_nan=False)
