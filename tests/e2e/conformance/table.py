"""Every field of every generating route, with values that must be honoured and values that must be refused.

One row per field: its variants are asked of router-over-PD and of a colocated worker, whole and streamed.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.server.requests import UNSUPPORTED

from .chat_rows import CHAT, QUESTION
from .completion_rows import COMPLETIONS
from .generate_rows import GENERATE
from .response_rows import RESPONSES
from .rows import Fields, Rows, no

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
