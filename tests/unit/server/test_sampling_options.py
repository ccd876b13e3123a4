from __future__ import annotations

import pytest

from diptych.common_config import override_config
from diptych.server.errors import BadRequest
from diptych.server.requests import SamplingFields
from diptych.server.sampling_options import (
    LengthFields,
    Limits,
    sample_seed,
    samples_per_prompt,
    sampling_params,
    text_options,
)

LIMITS = Limits(context_length=100, vocab_size=1000)
pytestmark = pytest.mark.usefixtures("published")


def length(max_tokens: int | None = None, min_tokens: int | None = None, least: int = 0) -> LengthFields:
    return LengthFields(max_tokens, "max_tokens", min_tokens, "min_tokens", "prompt", least)


def make(prompt: int = 10, max_tokens: int | None = 5, **fields):
    return sampling_params(SamplingFields(**fields), length(max_tokens), prompt, LIMITS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e6),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e9),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 10**300),
        ("stop_token_ids", [1000]),
        ("stop_token_ids", [-1]),
    ],
)
def test_values_out_of_range_are_refused_naming_the_field(field: str, value: object):
    with pytest.raises(BadRequest) as refused:
        make(**{field: value})
    assert refused.value.param == field
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("bias", "param"), [({1000: 1.0}, "logit_bias"), ({5: 101.0}, "logit_bias.5"), ({-1: 0.0}, "logit_bias")]
)
def test_bad_logit_bias_is_refused(bias: dict[int, float], param: str):
    with pytest.raises(BadRequest) as refused:
        make(logit_bias=bias)
    assert refused.value.param == param


def test_open_values_are_filled():
    params = make()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert params.repetition_penalty == 1.0
    assert params.logprobs is None
    assert 0 <= params.seed < 2**63
    assert make().seed != make().seed


def test_given_values_arrive():
    params = make(
        temperature=0, top_k=-1, top_p=0.5, min_p=0.1, seed=7, stop_token_ids=[3, 3], logit_bias={2: -1}
    )
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 0.5, 0.1)
    assert (params.seed, params.stop_token_ids, params.logit_bias) == (7, (3,), {2: -1.0})
    assert make(top_k=10**9).top_k == 0


def test_an_empty_nucleus_is_the_likeliest_token():
    params = make(top_p=0)
    assert (params.top_p, params.top_k) == (1.0, 1)


def test_without_a_length_the_rest_of_the_context_is_used():
    assert make(prompt=30, max_tokens=None).max_new_tokens == 70
    with override_config(default_max_tokens=16):
        assert make(prompt=30, max_tokens=None).max_new_tokens == 16
        assert make(prompt=95, max_tokens=None).max_new_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [
        (96, 5, "max_tokens"),
        (100, 1, "prompt"),  # no output would help: the prompt is what is too long
        (101, 0, "prompt"),
        (100, None, "prompt"),
        (10, 10**30, "max_tokens"),
    ],
)
def test_more_than_the_context_is_refused(prompt: int, max_tokens: int | None, param: str):
    with pytest.raises(BadRequest, match="context") as refused:
        make(prompt=prompt, max_tokens=max_tokens)
    assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")


def test_exactly_the_context_fits():
    assert make(prompt=95, max_tokens=5).max_new_tokens == 5
    assert make(prompt=100, max_tokens=0).max_new_tokens == 0


def test_negative_and_too_small_lengths_are_refused():
    with pytest.raises(BadRequest, match="max_tokens"):
        make(max_tokens=-1)
    with pytest.raises(BadRequest, match="max_tokens"):
        sampling_params(SamplingFields(), length(0, least=1), 10, LIMITS)
    with pytest.raises(BadRequest) as refused:
        sampling_params(SamplingFields(), length(5, 6), 10, LIMITS)
    assert refused.value.param == "min_tokens"


@pytest.mark.parametrize("stop", [[""], "", ["x"] * 65, ["y" * 1025]])
def test_unusable_stop_strings_are_refused(stop: str | list[str]):
    with pytest.raises(BadRequest) as refused:
        text_options(SamplingFields(stop=stop))
    assert refused.value.param == "stop"


def test_n_has_a_limit():
    with override_config(max_n=4):
        assert samples_per_prompt(None) == 1
        assert samples_per_prompt(4) == 4
        for n in (0, -1, 5, 10**30):
            with pytest.raises(BadRequest) as refused:
                samples_per_prompt(n)
            assert refused.value.param == "n"


def test_samples_of_one_seed_differ_and_the_first_keeps_it():
    seeds = [sample_seed(42, index) for index in range(8)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 8
    assert seeds == [sample_seed(42, index) for index in range(8)]
