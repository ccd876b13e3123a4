"""JSON schemas drawn from a seed: short answers, and every keyword that a grammar keeps."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ("^[a-f]{1,4}$", "^(yes|no)$", "^[0-9]{2}:[0-9]{2}$", "^#[0-9a-f]{3}$")
NAMES = ("id", "name", "tags", "size", "on", "kind", "at", "note")


def random_schema(seed: int) -> dict[str, Any]:
    """An object; some refer to a definition."""
    draw = random.Random(seed)
    schema = _object(draw, depth=2)
    if draw.random() < 0.2:
        schema["$defs"] = {"shared": _scalar(draw)}
        schema["properties"]["ref"] = {"$ref": "#/$defs/shared"}
    return schema


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    kind = draw.random()
    if depth == 0 or kind < 0.5:
        return _scalar(draw)
    if kind < 0.65:
        return _object(draw, depth - 1)
    if kind < 0.85:
        least = draw.randint(0, 2)
        items = _value(draw, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + draw.randint(0, 2)}
    if kind < 0.95:
        return {"anyOf": [_scalar(draw), draw.choice([{"type": "null"}, _scalar(draw)])]}
    return {"type": "array", "prefixItems": [_scalar(draw), _scalar(draw)], "minItems": 2, "maxItems": 2}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(1, 3))
    required = [name for name in names if draw.random() < 0.6]
    properties = {name: _value(draw, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _scalar(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    high = low + draw.randint(0, 200)
    return draw.choice(
        [
            {"type": "integer", "minimum": low, "maximum": high},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2},
            {"type": "number", "minimum": low, "maximum": high},
            {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 6)},
            {"type": "string", "pattern": draw.choice(PATTERNS)},
            {"type": "string", "format": "date"},
            {"enum": draw.sample(["red", "green", 'a "b"', 7, 1.5, True, None], 3)},
            {"const": draw.choice(["fixed", 42, {"a": [1]}])},
            {"type": "boolean"},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        ]
    )
