"""Schemas that no grammar would keep are known before one is made."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.server.schema_check import problem


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "integer", "if": {"const": 1}, "then": {"const": 2}}, "if"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"$ref": "https://example.com/schema.json"}, "outside"),
        ({"$ref": "#anchor"}, "outside"),
        ({"$ref": "#/$defs/x", "minLength": 3}, "minLength"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "allOf"),
        ({"type": "string", "allOf": [{"type": "string", "minLength": 1}]}, "allOf"),
        ({"type": "object", "anyOf": [{"type": "object"}]}, "anyOf"),
        ({"type": "string", "pattern": "^a$", "maxLength": 3}, "pattern together with maxLength"),
        ({"type": "string", "format": "date", "maxLength": 3}, "format together with maxLength"),
        ({"minLength": 3}, "minLength"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "required names 'b'"),
    ],
    ids=str,
)
def test_what_would_be_skipped_is_found_wherever_it_is(schema: dict[str, Any], reason: str) -> None:
    nested = {
        "$defs": {"deep": {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/deep"}},
    }
    for whole, place in ((schema, "at #)"), (nested, "at #/$defs/deep/items/anyOf/1)")):
        found = problem(whole)
        assert found is not None
        assert reason in found
        assert place in found


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"not": {"type": "string"}, "contains": {"type": "integer"}}},
        {"enum": [{"not": 1}], "title": "x"},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/a", "description": "annotated"}}},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Optional"},
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
        {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"},
        {"type": "string", "format": "date"},
        {"type": ["string", "null"], "minLength": 1},
        {"type": "array", "items": {"type": "integer", "multipleOf": 5}, "uniqueItems": False},
    ],
    ids=str,
)
def test_what_models_and_validators_usually_write_is_fine(schema: object) -> None:
    assert problem(schema) is None
