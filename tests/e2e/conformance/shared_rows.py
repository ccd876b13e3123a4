"""The fields that several routes share."""

from __future__ import annotations

from .rows import Fields, Rows, no

LIKELY, EOS = 28, 2
"""A token that a bias of 100 makes certain, and the one that ends answers."""


def certain(token: int) -> Fields:
    return {"logit_bias": {str(token): 100}}


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
TAG = {
    "type": "structural_tag",
    "format": {"type": "sequence", "elements": [{"type": "const_string", "value": "<a>"}]},
}

SAMPLING: Rows = {
    "temperature": [
        {"temperature": 0},
        {"temperature": 0.6},
        {"temperature": 1.9},
        no({"temperature": -0.1}),
        no({"temperature": 1e300}),
        no({"temperature": "hot"}),
    ],
    "top_p": [{"top_p": 0.5}, {"top_p": 0}, {"top_p": None}, no({"top_p": 1.5})],
    "top_k": [{"top_k": 5}, {"top_k": 1}, {"top_k": -1}, no({"top_k": -2}), no({"top_k": 1.5})],
    "min_p": [{"min_p": 0.2}, no({"min_p": 2})],
    "repetition_penalty": [{"repetition_penalty": 1.4, **certain(LIKELY)}, no({"repetition_penalty": 0})],
    "presence_penalty": [{"presence_penalty": 1.5, "temperature": 0}, no({"presence_penalty": -3})],
    "frequency_penalty": [{"frequency_penalty": 1.1, "temperature": 0}, no({"frequency_penalty": 3})],
    "seed": [{"seed": 0}, {"seed": 2**63 - 1}, no({"seed": -1}), no({"seed": 1.5}), no({"seed": 2**63})],
    "n": [{"n": 1}, {"n": 3}, no({"n": 0}), no({"n": 10**6}), no({"n": "two"})],
    "stop": [
        {"stop": "e"},
        {"stop": ["a stop that never comes", "e"]},
        {"stop": []},
        {"stop": None},
        no({"stop": [""]}),
        no({"stop": [1]}),
    ],
    "stop_token_ids": [
        {"stop_token_ids": [LIKELY], **certain(LIKELY)},
        {"stop_token_ids": []},
        no({"stop_token_ids": [10**6]}),
    ],
    "ignore_eos": [
        {"ignore_eos": True, **certain(EOS)},
        {"ignore_eos": False, **certain(EOS)},
        no({"ignore_eos": 1}),
    ],
    "min_tokens": [
        {"min_tokens": 4, "stop_token_ids": [LIKELY], **certain(LIKELY)},
        no({"min_tokens": -1}),
        no({"min_tokens": 10**6}),
    ],
    "logit_bias": [
        {"logit_bias": {"260": 5, "1165": -100}},
        {"logit_bias": {}},
        no({"logit_bias": {"1000000": 1}}),
        no({"logit_bias": {"one": 1}}),
        no({"logit_bias": {"260": 101}}),
    ],
    "skip_special_tokens": [
        {"skip_special_tokens": False, "ignore_eos": True, **certain(EOS)},
        {"skip_special_tokens": True, "ignore_eos": True, **certain(EOS)},
    ],
    "no_stop_trim": [
        {"no_stop_trim": True, "stop": "e"},
        {"no_stop_trim": True, "ignore_eos": False} | certain(EOS),
    ],
    "include_stop_str_in_output": [{"include_stop_str_in_output": True, "stop": "e"}],
    # What the answer must match.
    "response_format": [
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"response_format": {"type": "structural_tag", **{"format": TAG["format"]}}},
        no({"response_format": {"type": "xml"}}),
        no({"response_format": {"type": "json_schema"}}),
        no({"response_format": {"type": "json_object"}, "regex": "a"}, param="regex"),
    ],
    "structured_outputs": [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"regex": "[0-9]{3}"}},
        {"structured_outputs": {"choice": ["red", "blue"]}},
        {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"structural_tag": TAG}},
        no({"structured_outputs": {"whitespace_pattern": " "}}),
        no({"structured_outputs": {}}),
        no({"structured_outputs": {"regexp": "a"}}),
    ],
    "guided_json": [{"guided_json": SCHEMA}, no({"guided_json": 7})],
    "guided_regex": [{"guided_regex": "[0-9]{3}"}, no({"guided_regex": "("})],
    "guided_choice": [
        {"guided_choice": ["red", "blue"]},
        no({"guided_choice": [""]}),
        no({"guided_choice": []}),
    ],
    "guided_grammar": [{"guided_grammar": 'root ::= "yes" | "no"'}],
    "json_schema": [{"json_schema": SCHEMA}, no({"json_schema": "{"})],
    "regex": [{"regex": "(a|b){4}"}, no({"regex": ""})],
    "ebnf": [{"ebnf": 'root ::= "yes" | "no"'}, no({"ebnf": "root ::= "})],
    "structural_tag": [{"structural_tag": TAG}, no({"structural_tag": "{"})],
}

STREAMING: Rows = {
    "model": [{"model": "default"}, {"model": None}, no({"model": "nobody/knows-it"}, 404)],
    "stream": [{"stream": None}, no({"stream": "yes"})],
    "stream_options": [
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": False}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_obfuscation": True}},
        no({"stream_options": True}),
    ],
    "rid": [{"rid": "of the client"}, no({"rid": ""}), no({"rid": 7})],
}

LENGTH: Rows = {
    "max_tokens": [
        {"max_tokens": 1},
        {"max_tokens": 25},
        no({"max_tokens": -5}),
        no({"max_tokens": 1.5}),
        no({"max_tokens": 10**30}),
        no({"max_tokens": 10**6}),
    ],
    "max_completion_tokens": [
        {"max_completion_tokens": 7, "max_tokens": 3},
        no({"max_completion_tokens": -1}),
    ],
}
