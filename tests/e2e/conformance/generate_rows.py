"""The fields of `/generate`."""

from __future__ import annotations

from .chat_rows import LONG
from .rows import Fields, Refused, Rows, no
from .shared_rows import LENGTH, LIKELY, SAMPLING, STREAMING, certain


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
                no({"sampling_seed": -1, "seed": None}),
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
