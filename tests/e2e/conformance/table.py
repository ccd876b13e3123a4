"""Every field of every generating route, with values that must be honoured and values that must be refused.

One row per field: its variants are asked of router-over-PD and of a colocated worker, whole and streamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.server.requests import UNSUPPORTED

Fields = dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """Must be refused with this status by an error that names the row's field."""

    fields: Fields
    status: int = 400
    param: str | None = None
    """What the error names instead, or begins with."""


Rows = Mapping[str, Sequence[Fields | Refused]]


def no(fields: Fields, status: int = 400, param: str | None = None) -> Refused:
    return Refused(fields, status, param)


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
    ],
    "guided_json": [{"guided_json": SCHEMA}, no({"guided_json": 7})],
    "guided_regex": [{"guided_regex": "[0-9]{3}"}, no({"guided_regex": "("})],
    "guided_choice": [{"guided_choice": ["red", "blue"]}, no({"guided_choice": [""]})],
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

ACCEPTED: Fields = {
    "user": "somebody",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "an_unknown_field": [1],
}
"""What clients send that changes no answer."""

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

QUESTION = [{"role": "user", "content": "Write three sentences about a lighthouse."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {"type": "object", "properties": {"at": {"enum": ["sea", "port"]}}, "required": ["at"]},
    },
}
LONG = "long " * 4200
"""Longer than the model's context of 4,096 tokens, shorter than what is refused by its characters."""


def messages(*given: tuple[str, Any], **more: Any) -> Fields:
    return {"messages": [{"role": role, "content": content} for role, content in given], **more}


CHAT: Rows = {
    **SAMPLING,
    **STREAMING,
    **LENGTH,
    "messages": [
        messages(("user", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])),
        messages(("system", "Be short."), ("user", "Hi"), ("assistant", "Hello"), ("user", "More")),
        messages(("developer", "Be short."), ("user", "Hi")),
        messages(("user", "What is the weather?"), ("tool", "rain")),
        {"messages": [{"role": "user", "content": "Hi", "name": "me"}]},
        no({"messages": []}),
        no({"messages": "hi"}),
        no({"messages": None}),
        no(messages(("robot", "x"))),
        no(messages(("user", None))),
        no(messages(("user", [{"type": "image_url", "image_url": {"url": "data:,"}}]))),
        no(messages(("user", LONG))),
    ],
    "logprobs": [{"logprobs": True}, {"logprobs": False}, no({"logprobs": 3})],
    "top_logprobs": [
        {"logprobs": True, "top_logprobs": 4},
        {"logprobs": True, "top_logprobs": 4, "max_tokens": 1, "n": 2},
        no({"logprobs": True, "top_logprobs": 21}),
        no({"top_logprobs": 2}),
    ],
    "continue_final_message": [
        messages(("user", "Count."), ("assistant", "One, two,"), continue_final_message=True)
    ],
    "add_generation_prompt": [{"add_generation_prompt": False}],
    "chat_template_kwargs": [
        {"chat_template_kwargs": {"enable_thinking": False}},
        no({"chat_template_kwargs": 1}),
    ],
    "tools": [
        {"tools": [TOOL]},
        {"tools": []},
        no({"tools": [{"type": "function"}]}),
    ],
    "tool_choice": [
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
        {
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "max_tokens": 60,
        },
        no({"tools": [TOOL], "tool_choice": "perhaps"}),
    ],
    "parallel_tool_calls": [
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    ],
    "reasoning_effort": [no({"reasoning_effort": "low"})],
    "separate_reasoning": [{"separate_reasoning": False, "regex": "<think>a</think>b", "max_tokens": 30}],
    "stream_reasoning": [{"stream_reasoning": False, "regex": "b"}],
    "include_reasoning": [{"include_reasoning": False, "regex": "b"}],
}

COMPLETIONS: Rows = {
    **SAMPLING,
    **STREAMING,
    **LENGTH,
    "prompt": [
        {"prompt": [504, 2365, 282, 253]},
        {"prompt": ["The sea", "A ship", "The harbour at night"]},
        {"prompt": [[504, 2365], [253, 4512, 282]]},
        {"prompt": ["The sea", "A ship"], "n": 2},
        no({"prompt": ""}),
        no({"prompt": []}),
        no({"prompt": [5, -1]}),
        no({"prompt": [10**9]}),
        no({"prompt": [5, "a"]}),
        no({"prompt": LONG}),
        no({"prompt": None}),
    ],
    "logprobs": [
        {"logprobs": 0},
        {"logprobs": 3},
        {"logprobs": 2, "max_tokens": 1},
        {"logprobs": 2, "stop": "e"},
        no({"logprobs": 21}),
        no({"logprobs": True}),
    ],
    "echo": [
        {"echo": True},
        {"echo": True, "logprobs": 2},
        # What evaluation harnesses send: prompts scored, alone and in batches.
        {"echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0},
        {"echo": True, "logprobs": 1, "max_tokens": 1, "prompt": [[504, 2365, 282], [253, 4512]]},
        {"echo": True, "prompt": [504, 2365], "n": 2},
        no({"echo": 1}),
    ],
    "best_of": [
        {"best_of": 1},
        {"best_of": 4, "n": 2},
        {"best_of": 3, "logprobs": 1, "prompt": ["The sea", "A ship"]},
        no({"best_of": 1, "n": 2}),
        no({"best_of": 0}),
    ],
}
COMPLETIONS = {**COMPLETIONS, "max_tokens": [*COMPLETIONS["max_tokens"], {"max_tokens": 0}]}

RESPONSES: Rows = {
    **{name: variants for name, variants in SAMPLING.items() if name not in ("n", "response_format")},
    **STREAMING,
    "n": [{"n": 1}, no({"n": 2})],
    "response_format": [no({"response_format": {"type": "json_object"}})],
    "max_tokens": [no({"max_tokens": 20})],
    "max_completion_tokens": [no({"max_completion_tokens": 20})],
    "max_output_tokens": [
        {"max_output_tokens": 16},
        {"max_output_tokens": None},
        no({"max_output_tokens": 15}),
        no({"max_output_tokens": 10**6}),
    ],
    "input": [
        {"input": [{"role": "user", "content": "Hi"}]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
        {
            "input": [
                {"type": "message", "role": "developer", "content": "Be short."},
                {"role": "user", "content": "Hi"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
                {"role": "user", "content": "More"},
            ]
        },
        no({"input": ""}),
        no({"input": []}),
        no({"input": None}),
        no({"input": LONG}),
        no({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}),
        no({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}),
        no({"input": [{"role": "robot", "content": "x"}]}),
    ],
    "instructions": [{"instructions": "Be short."}, no({"instructions": 7})],
    "top_logprobs": [{"top_logprobs": 3}, no({"top_logprobs": 21})],
    "include": [
        {"include": ["message.output_text.logprobs"]},
        {"include": ["reasoning.encrypted_content"]},
        no({"include": ["everything"]}),
    ],
    "text": [
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        no({"text": {"format": {"type": "xml"}}}),
        no({"text": {"format": {"type": "json_object"}}, "regex": "a"}, param="regex"),
    ],
    "reasoning": [{"reasoning": {"summary": "auto"}}, no({"reasoning": {"effort": "low"}})],
    "metadata": [{"metadata": {"a": "b"}}, no({"metadata": {"a": 1}})],
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "separate_reasoning": [{"separate_reasoning": False, "regex": "<think>a</think>b"}],
    "stream_reasoning": CHAT["stream_reasoning"],
    "include_reasoning": CHAT["include_reasoning"],
    "previous_response_id": [no({"previous_response_id": "resp_1"})],
    "conversation": [no({"conversation": "conv_1"})],
    "prompt": [no({"prompt": {"id": "p"}})],
    "background": [{"background": False}, no({"background": True})],
    "truncation": [{"truncation": "disabled"}, no({"truncation": "auto"})],
    "context_management": [no({"context_management": [{"type": "compaction"}]})],
    "messages": [no({"messages": QUESTION})],
    "reasoning_effort": [no({"reasoning_effort": "low"})],
    "tools": [{"tools": []}, no({"tools": [{"type": "web_search"}]})],
    "tool_choice": [{"tool_choice": "auto"}, no({"tool_choice": "required"})],
}

_NATIVE_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


def nested(rows: Rows) -> Rows:
    """The same inside `sampling_params`."""

    def inside(variant: Fields | Refused) -> Fields | Refused:
        if isinstance(variant, Refused):
            param = variant.param and f"sampling_params.{variant.param}"
            return no({"sampling_params": variant.fields}, variant.status, param)
        return {"sampling_params": variant}

    return {f"sampling_params.{name}": [inside(v) for v in variants] for name, variants in rows.items()}


def with_fields(variant: Fields | Refused, fields: Fields) -> Fields | Refused:
    if isinstance(variant, Refused):
        return no({**variant.fields, **fields}, variant.status, variant.param)
    return {**variant, **fields}


GENERATE: Rows = {
    **nested(SAMPLING),
    **nested(
        {
            "max_tokens": [
                with_fields(variant, {"max_new_tokens": None}) for variant in LENGTH["max_tokens"]
            ],
            "max_new_tokens": [{"max_new_tokens": 0}, {"max_new_tokens": 25}, no({"max_new_tokens": -1})],
            "min_new_tokens": [{"min_new_tokens": 4, "stop_token_ids": [LIKELY], **certain(LIKELY)}],
            "sampling_seed": [
                {"sampling_seed": 5, "seed": None},
                no({"sampling_seed": -1, "seed": None}, param="seed"),
            ],
        }
    ),
    "sampling_params": [
        {
            "text": ["The sea", "A ship"],
            "sampling_params": [{"max_new_tokens": 2, "seed": 1}, {"max_new_tokens": 3, "seed": 2}],
        },
        no({"sampling_params": [{}, {}]}),
        no({"sampling_params": 7}),
    ],
    "text": [
        {"text": ["The sea", "A ship"]},
        {"text": ["The sea"], "sampling_params": {"n": 2, "max_new_tokens": 4}},
        no({"text": ""}),
        no({"text": None}),
        no({"text": LONG}),
    ],
    "input_ids": [
        {"text": None, "input_ids": [504, 2365, 282]},
        {"text": None, "input_ids": [[504, 2365], [282]]},
        no({"text": None, "input_ids": [10**9]}),
        no({"input_ids": [5]}, param="text"),
    ],
    "rid": [
        {"rid": "of the client"},
        {"text": ["a", "b"], "rid": ["one", "two"]},
        no({"rid": ["one", "two"]}),
    ],
    "stream": STREAMING["stream"],
    "return_logprob": [
        {"return_logprob": True},
        {"return_logprob": [False, True], "text": ["The sea", "A ship"]},
        no({"return_logprob": 1}),
    ],
    "logprob_start_len": [
        {"return_logprob": True, "logprob_start_len": 0},
        {"return_logprob": True, "logprob_start_len": 2},
        {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}},
        no({"return_logprob": True, "logprob_start_len": 10**6}),
    ],
    "top_logprobs_num": [
        {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
        no({"return_logprob": True, "top_logprobs_num": 129}),
    ],
    "return_text_in_logprobs": [
        {
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "top_logprobs_num": 1,
            "logprob_start_len": 0,
        }
    ],
}


@dataclass(frozen=True)
class Route:
    base: Fields
    rows: Rows

    def body(self, fields: Fields) -> Fields:
        body = {**self.base, **fields}
        if isinstance(fields.get("sampling_params"), dict):
            body["sampling_params"] = {**self.base["sampling_params"], **fields["sampling_params"]}
        return {name: value for name, value in body.items() if value is not None or name in fields}


def with_common_rows(rows: Rows) -> Rows:
    """With what no route honours, and what each ignores."""
    refused = {name: [no({name: {"asked": "for"}})] for name in UNSUPPORTED if name not in rows}
    return {
        **rows,
        **refused,
        "accepted": [{name: value} for name, value in ACCEPTED.items() if name not in rows],
    }


ROUTES = {
    "/v1/chat/completions": Route(
        {"messages": QUESTION, "max_tokens": 8, "seed": 11}, with_common_rows(CHAT)
    ),
    "/v1/completions": Route(
        {"prompt": "The lighthouse keeper", "max_tokens": 8, "seed": 11}, with_common_rows(COMPLETIONS)
    ),
    "/v1/responses": Route(
        {"input": QUESTION[0]["content"], "max_output_tokens": 16, "seed": 11}, with_common_rows(RESPONSES)
    ),
    "/generate": Route(
        {"text": "The lighthouse keeper", "sampling_params": {"max_new_tokens": 8, "seed": 11}},
        with_common_rows(GENERATE),
    ),
}
