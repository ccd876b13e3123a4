"""Every spelling of what an answer must match, and that only one may be given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.engine.wire import Grammar
from diptych.server.body import decode_json
from diptych.server.errors import BadRequest
from diptych.server.grammar_options import (
    MAX_GRAMMAR_BYTES,
    grammar_option,
    refuse_outside_sampling_params,
)
from diptych.server.requests import GrammarFields, SamplingFields

SCHEMA = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}'
TAG = '{"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}'


def option(text: str, prefix: str = "") -> Grammar | None:
    return grammar_option(decode_json(text.encode(), SamplingFields), prefix)


def named(fields: dict[str, Any]) -> Grammar | None:
    return option(json.dumps(fields))


def test_a_schema_stays_as_it_was_written() -> None:
    """The order of its properties is the order of the answer's."""
    wrapped = '{"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": %s}}}'
    assert option(wrapped % SCHEMA) == Grammar("json_schema", SCHEMA, "response_format.json_schema.schema")
    for name in ("guided_json", "json_schema"):
        assert option(f'{{"{name}": {SCHEMA}}}') == Grammar("json_schema", SCHEMA, name)
        assert named({name: SCHEMA}) == Grammar("json_schema", SCHEMA, name), "inside a string"
    assert option(f'{{"structured_outputs": {{"json": {SCHEMA}}}}}') == Grammar(
        "json_schema", SCHEMA, "structured_outputs.json"
    )


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        ({"response_format": {"type": "regex", "regex": "a+"}}, "regex", "a+", "response_format"),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, "regex", "a+", "response_format"),
        (
            {"response_format": {"type": "grammar", "grammar": "start: B"}},
            "lark",
            "start: B",
            "response_format",
        ),
        (
            {"response_format": {"type": "ebnf", "value": "root ::= x"}},
            "ebnf",
            "root ::= x",
            "response_format",
        ),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_grammar": "root ::= x"}, "ebnf", "root ::= x", "guided_grammar"),
        ({"guided_grammar": "start: B"}, "lark", "start: B", "guided_grammar"),
        ({"guided_choice": ["a", 'b"', "ü\\"]}, "ebnf", 'root ::= "a" | "b\\"" | "ü\\\\"', "guided_choice"),
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"ebnf": "root ::= x"}, "ebnf", "root ::= x", "ebnf"),
        ({"structural_tag": TAG}, "structural_tag", TAG, "structural_tag"),
        ({"structural_tag": json.loads(TAG)}, "structural_tag", TAG, "structural_tag"),
        ({"response_format": json.loads(TAG)}, "structural_tag", TAG, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "ebnf", 'root ::= "a"', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "s: B"}}, "lark", "s: B", "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        (
            {"structured_outputs": {"structural_tag": TAG}},
            "structural_tag",
            TAG,
            "structured_outputs.structural_tag",
        ),
    ],
    ids=str,
)
def test_every_spelling_is_understood(fields: dict[str, Any], kind: Any, text: str, param: str) -> None:
    assert named(fields) == Grammar(kind, text, param)


def test_the_older_structural_tag_is_translated() -> None:
    old = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    for grammar in (named({"response_format": old}), named({"structural_tag": json.dumps(old)})):
        assert grammar is not None
        tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}}
        assert json.loads(grammar.text) == {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag | {"end": "</f>"}]},
        }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "guided_json": None, "regex": None, "structured_outputs": None},
        {"response_format": {"type": "text"}},
        {"guided_choice": None},
        {"structured_outputs": {"json_object": False, "regex": None}},
    ],
    ids=str,
)
def test_these_ask_for_nothing(fields: dict[str, Any]) -> None:
    assert named(fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": [{"type": "json_object"}]}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        ({"guided_json": "{not json"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": ""}, "guided_json"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": None}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"a": {}, "regex": "x"}}, "structured_outputs"),
        ({"guided_choice": [str(i) for i in range(5000)]}, "guided_choice"),
        ({"structural_tag": "x"}, "structural_tag"),
        ({"structural_tag": {"structures": [{"begin": 1}]}}, "structural_tag"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "regex"),
        ({"regex": "a", "ebnf": "root ::= x"}, "ebnf"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_json": {"not": {}}}, "guided_json"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        named(fields)
    assert refused.value.param == param


def test_the_native_route_names_where_the_field_is_and_refuses_it_elsewhere() -> None:
    assert option('{"regex": "a"}', "sampling_params.") == Grammar("regex", "a", "sampling_params.regex")
    refuse_outside_sampling_params(b'{"text": "x", "sampling_params": {"regex": "a"}}')
    with pytest.raises(BadRequest) as refused:
        refuse_outside_sampling_params(b'{"text": "x", "json_schema": "{}"}')
    assert refused.value.param == "json_schema"


def test_every_field_is_read() -> None:
    """A field that is declared and forgotten would be ignored silently."""
    for name in GrammarFields.__struct_fields__:
        asks = {"response_format": {"type": "regex", "regex": "x"}, "structured_outputs": {"regex": "x"}}
        text = {"guided_json": "{}", "json_schema": "{}", "structural_tag": "{}", "guided_choice": ["x"]}
        assert named({name: (asks | text).get(name, "x")}) is not None, name
