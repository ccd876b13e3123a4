"""The bounds in the OpenAPI document are those that the handlers check."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from diptych.common_config import override_config
from diptych.server.errors import BadRequest
from diptych.server.requests import SamplingFields
from diptych.server.sampling_options import (
    LengthFields,
    Limits,
    samples_per_prompt,
    sampling_params,
    text_options,
)

LIMITS = Limits(context_length=4096, vocab_size=64)

(_, COMPONENTS) = msgspec.json.schema_components([SamplingFields])
SCHEMA: dict[str, dict[str, Any]] = {
    name: next((s for s in field.get("anyOf", [field]) if s.get("type") != "null"), {})
    for name, field in COMPONENTS["SamplingFields"]["properties"].items()
}


def take(**fields: object) -> None:
    """Everything that reads such fields."""
    asked = msgspec.convert(fields, SamplingFields)
    length = LengthFields(asked.max_tokens, "max_tokens", asked.min_tokens, "min_tokens", "prompt")
    sampling_params(asked, length, 8, LIMITS)
    text_options(asked)
    samples_per_prompt(asked.n)


NUMBERS = [name for name, schema in SCHEMA.items() if schema.get("type") in ("number", "integer")]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_taken_up_to_their_bounds_and_no_further(name: str) -> None:
    schema = SCHEMA[name]
    whole = schema["type"] == "integer"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    below = low - 1 if whole else math.nextafter(low, -math.inf)
    if "exclusiveMinimum" in schema:
        low, below = math.nextafter(low, math.inf), low
    high = schema.get("maximum")
    with override_config(max_n=8):
        take(**{name: low})
        with pytest.raises(BadRequest, match=name):
            take(**{name: below})
        if high is not None:
            take(**{name: high})
            with pytest.raises(BadRequest, match=name):
                take(**{name: high + 1 if whole else math.nextafter(high, math.inf)})


def test_every_number_has_a_bound() -> None:
    assert len(NUMBERS) > 8
    assert [name for name in NUMBERS if not {"minimum", "exclusiveMinimum"} & SCHEMA[name].keys()] == []


def test_stop_strings_are_taken_up_to_their_bounds_and_no_further() -> None:
    text, texts = COMPONENTS["SamplingFields"]["properties"]["stop"]["anyOf"][:2]
    longest, most = "x" * text["maxLength"], texts["maxItems"]
    assert texts["items"] == text
    many = [f"{number}" for number in range(most)]
    with override_config(max_n=8):
        take(stop=longest)
        take(stop=[longest])
        take(stop=many)
        for refused in (longest + "x", [longest + "x"], ["x" * (text["minLength"] - 1)], [*many, "x"]):
            with pytest.raises(BadRequest, match="stop"):
                take(stop=refused)


def test_token_ids_and_biases_are_taken_up_to_their_bounds_and_no_further() -> None:
    most = SCHEMA["stop_token_ids"]["maxItems"]
    bias = SCHEMA["logit_bias"]["additionalProperties"]
    with override_config(max_n=8):
        take(stop_token_ids=[1] * most)
        take(logit_bias={1: bias["minimum"], 2: bias["maximum"]})
        for refused in (
            {"stop_token_ids": [1] * (most + 1)},
            {"stop_token_ids": [SCHEMA["stop_token_ids"]["items"]["minimum"] - 1]},
            {"logit_bias": {1: bias["minimum"] - 1}},
            {"logit_bias": {1: bias["maximum"] + 1}},
        ):
            with pytest.raises(BadRequest):
                take(**refused)
