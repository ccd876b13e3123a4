"""The batched sampler against the definitions, one option at a time and mixed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from diptych.engine.sampling import Sampler
from diptych.engine.sampling.draw import draw_filtered, draw_unfiltered
from diptych.engine.wire import SamplingParams

CPU = torch.device("cpu")
PROMPT = (1, 5, 5, 7)
OUTPUT = (9, 3, 9, 9)

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_k=1": {"top_k": 1},
    "top_k over V": {"top_k": 10**6},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 1e-9},
    "top_p needs a full sort": {"top_p": 0.97, "temperature": 20.0},
    "min_p": {"min_p": 0.1},
    "min_p=1": {"min_p": 1.0},
    "all filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    "large top_k and top_p": {"top_k": 600, "top_p": 0.9, "temperature": 10.0},
    "repetition": {"repetition_penalty": 1.8},
    "repetition under 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.2},
    "all penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {4: 100.0, 6: 99.0, 1: -100.0}},
    "minimum": {"min_new_tokens": 9, "stop_token_ids": (3, 4)},
    "minimum without eos": {"min_new_tokens": 9, "ignore_eos": True, "stop_token_ids": (11,)},
    "greedy with everything": {
        "temperature": 0.0,
        "repetition_penalty": 1.2,
        "frequency_penalty": 2.0,
        "logit_bias": {9: 3.0},
        "min_new_tokens": 5,
    },
    "drawn with everything": {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {9: 3.0, 12: -2.0},
        "min_new_tokens": 5,
    },
}


def random_logits(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("width", [97, 1024])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_each_option_draws_what_its_definition_says(
    options: dict[str, Any], width: int, state: Callable[..., Any], allowed_tokens: Callable[..., set[int]]
) -> None:
    logits = random_logits(24, width, seed=width)
    states = [state(width, PROMPT, OUTPUT, seed=seed, **options) for seed in range(24)]
    drawn = [token.token_id for token in Sampler(width, CPU).sample(logits, states)]
    rows = logits.numpy()
    for i, current in enumerate(states):
        assert drawn[i] in allowed_tokens(rows[i], current.params, PROMPT, OUTPUT)


def test_a_batch_of_everything_draws_each_row_as_if_it_were_alone(
    state: Callable[..., Any], allowed_tokens: Callable[..., set[int]]
) -> None:
    width = 1024
    logits = random_logits(3 * len(OPTIONS), width, seed=5)
    cases = [(options, seed) for seed in range(3) for options in OPTIONS.values()]
    order = random.Random(1).sample(range(len(cases)), len(cases))
    logits = logits[order]
    outputs = [tuple(range(i % 7)) for i in order]
    states = [
        state(width, PROMPT, outputs[at], seed=cases[i][1], **cases[i][0]) for at, i in enumerate(order)
    ]
    sampler = Sampler(width, CPU)
    together = [token.token_id for token in sampler.sample(logits, states)]
    alone = [sampler.sample(logits[i : i + 1], [s])[0].token_id for i, s in enumerate(states)]
    assert together == alone
    rows = logits.numpy()
    for i, current in enumerate(states):
        assert together[i] in allowed_tokens(rows[i], current.params, PROMPT, outputs[i])


def test_a_seeded_sample_draws_the_same_tokens_alone_in_a_batch_and_after_a_rebuild(
    state: Callable[..., Any],
) -> None:
    width, steps = 300, 12
    per_step = random_logits(steps, width, seed=3)
    options: dict[str, Any] = {"seed": -77, "top_p": 0.95, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    sampler = Sampler(width, CPU)

    def run(companions: int, rebuild_at: int | None) -> list[int]:
        output: list[int] = []
        current = state(width, PROMPT, **options)
        for step in range(steps):
            if step == rebuild_at:
                current = state(width, PROMPT, output, **options)
            others = [state(width, seed=i + step, temperature=float(i % 2)) for i in range(companions)]
            logits = torch.cat([random_logits(companions, width, seed=step), per_step[step : step + 1]])
            output.append(sampler.sample(logits, [*others, current])[-1].token_id)
            current.append(output[-1])
        return output

    alone = run(0, None)
    assert len(set(alone)) > 3
    assert run(9, None) == alone
    assert run(2, 5) == alone


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0}, {"temperature": 1.5, "top_k": 12}, {"top_p": 0.9}, {"min_p": 0.05}],
    ids=str,
)
def test_draws_over_many_seeds_follow_the_distribution(
    options: dict[str, Any], state: Callable[..., Any], expected_distribution: Callable[..., np.ndarray]
) -> None:
    width, draws = 32, 6000
    row = random_logits(1, width, seed=8)
    states = [state(width, seed=seed, **options) for seed in range(draws)]
    tokens = [token.token_id for token in Sampler(width, CPU).sample(row.expand(draws, width), states)]
    expected = expected_distribution(row[0].numpy(), states[0].params, PROMPT, ()) * draws
    counts = np.bincount(tokens, minlength=width)
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    chi_square = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    freedom = likely.sum() - 1
    assert chi_square < freedom + 3.3 * np.sqrt(2 * freedom) + 4  # beyond the 99.9 % quantile


def test_equal_logits_resolve_to_the_lowest_id(state: Callable[..., Any]) -> None:
    for width in (100, 1024):
        logits = torch.zeros(3, width)
        logits[:, [11, 40, 90]] = 4.0
        states = [
            state(width, temperature=0.0),
            state(width, top_k=1),
            state(width, temperature=0.0, logit_bias={0: -1.0}),
        ]
        assert [t.token_id for t in Sampler(width, CPU).sample(logits, states)] == [11, 11, 11]


def test_top_k_keeps_exactly_k_of_equal_tokens(state: Callable[..., Any]) -> None:
    width = 600
    logits = torch.zeros(400, width)
    logits[:, 500] = 1.0
    states = [state(width, top_k=4, seed=seed) for seed in range(400)]
    drawn = {t.token_id for t in Sampler(width, CPU).sample(logits, states)}
    assert drawn == {500, 0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1.0, 1e3, 1e30])
@pytest.mark.parametrize("options", [{}, {"top_k": 10}, {"top_p": 0.999999}, {"min_p": 0.5}], ids=str)
def test_extreme_logits_and_temperatures_give_a_valid_token(
    temperature: float, options: dict[str, Any], state: Callable[..., Any]
) -> None:
    width = 700
    logits = random_logits(8, width, seed=1)
    logits[0] *= 1e5
    logits[1, 3] = 3e38
    logits[2] = -3e38
    logits[3] = -1e4
    logits[3, 699] = 1e4
    states = [state(width, seed=i, temperature=temperature, **options) for i in range(8)]
    tokens = [t.token_id for t in Sampler(width, CPU).sample(logits, states)]
    assert all(0 <= token < width for token in tokens)
    if temperature <= 1.0:
        assert tokens[1] == 3
        assert tokens[3] == 699


@pytest.mark.parametrize("width", [255, 256, 257])
def test_the_largest_uniform_number_draws_the_last_possible_token(width: int) -> None:
    scaled = torch.zeros(2, width)
    scaled[1, 200:] = float("-inf")
    params = [SamplingParams(max_new_tokens=1, seed=0, top_p=0.9999999999)] * 2
    u = torch.tensor([1.0 - 2**-53] * 2, dtype=torch.float64)
    assert draw_unfiltered(scaled.clone(), params, u).tolist() == [width - 1, 199]
    assert draw_filtered(scaled.clone(), params, u).tolist() == [width - 1, 199]
    assert draw_unfiltered(scaled.clone(), params, u * 0).tolist() == [0, 0]
    assert draw_filtered(scaled.clone(), params, u * 0).tolist() == [0, 0]


def test_rounding_never_draws_a_token_of_zero_probability() -> None:
    scaled = -random_logits(200, 512, seed=9).abs()
    scaled[:, 200:] = float("-inf")  # float32 block sums lie above the exact ones in about half of the rows
    u = torch.full((200,), 1.0 - 2**-53, dtype=torch.float64)
    drawn = draw_unfiltered(scaled, [SamplingParams(max_new_tokens=1, seed=0)] * 200, u)
    assert drawn.max() <= 199


def test_logit_bias_of_100_forces_and_bans(state: Callable[..., Any]) -> None:
    width = 512
    logits = random_logits(200, width, seed=4)
    forced = [state(width, seed=i, logit_bias={17: 100.0}) for i in range(100)]
    banned = [state(width, seed=i, logit_bias={t: -100.0 for t in range(510)}) for i in range(100)]
    tokens = [t.token_id for t in Sampler(width, CPU).sample(logits, forced + banned)]
    assert set(tokens[:100]) == {17}
    assert set(tokens[100:]) == {510, 511}


def test_stop_tokens_are_masked_until_the_minimum_is_reached(state: Callable[..., Any]) -> None:
    width = 64
    logits = torch.zeros(1, width)
    logits[0, 2], logits[0, 8], logits[0, 30] = 9.0, 8.0, 5.0
    current = state(width, temperature=0.0, min_new_tokens=2, stop_token_ids=(8,))
    sampler, drawn = Sampler(width, CPU), []
    for _ in range(3):
        drawn.append(sampler.sample(logits, [current])[0].token_id)
        current.append(drawn[-1])
    assert drawn == [30, 30, 2]
    ignoring = state(width, temperature=0.0, min_new_tokens=2, ignore_eos=True)
    assert sampler.sample(logits, [ignoring])[0].token_id == 2


def test_sampling_leaves_the_logits_as_they_are(state: Callable[..., Any]) -> None:
    width = 1024
    logits = random_logits(len(OPTIONS), width, seed=2)
    before = logits.clone()
    for options in OPTIONS.values():  # every option alone too: a group may be the whole batch
        states = [state(width, PROMPT, OUTPUT, logprobs=2, **options) for _ in range(len(OPTIONS))]
        Sampler(width, CPU).sample(logits, states)
        assert torch.equal(logits, before)


def test_a_batch_that_does_not_fit_is_refused(state: Callable[..., Any]) -> None:
    sampler = Sampler(64, CPU)
    with pytest.raises(ValueError, match=r"\(1, 63\), expected \(1, 64\)"):
        sampler.sample(torch.zeros(1, 63), [state(64)])
    with pytest.raises(ValueError, match="expected"):
        sampler.sample(torch.zeros(2, 64), [state(64)])
    assert sampler.sample(torch.zeros(0, 64), []) == []


def test_a_row_of_nan_harms_no_other_row(state: Callable[..., Any]) -> None:
    width = 512
    logits = random_logits(6, width, seed=6)
    options: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_p": 0.9}] * 2
    states = [state(width, seed=i, logprobs=2, **options[i]) for i in range(6)]
    sampler = Sampler(width, CPU)
    expected = sampler.sample(logits, states)
    logits[:3] = float("nan")
    tokens = sampler.sample(logits, states)
    assert tokens[3:] == expected[3:]
    assert all(0 <= token.token_id < width for token in tokens)
