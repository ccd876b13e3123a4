"""The oracle: `transformers`' logits processors on random logits, drawn from with the same noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from diptych.engine.sampling import Sampler
from diptych.engine.sampling.noise import stream_state, uniforms

CPU = torch.device("cpu")
PROMPT, OUTPUT = [1, 5, 5, 7, 60], [9, 3, 9]


def oracle(params: Any) -> LogitsProcessorList:
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps


@pytest.mark.parametrize("width", [61, 2048, 5000])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"temperature": 0.4},
        {"top_k": 7},
        {"top_p": 0.6},
        {"top_p": 0.99, "temperature": 2.5},
        {"min_p": 0.2},
        {"top_k": 30, "top_p": 0.8},
        {"top_k": 50, "top_p": 0.95, "min_p": 0.1, "temperature": 1.4, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_draws_equal_those_from_the_processed_logits(
    options: dict[str, Any], width: int, state: Callable[..., Any], drawable: Callable[..., set[int]]
) -> None:
    rows = 64
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * 3
    states = [state(width, PROMPT, OUTPUT, seed=1000 + i, **options) for i in range(rows)]
    drawn = [token.token_id for token in Sampler(width, CPU).sample(logits, states)]

    history = torch.tensor([PROMPT + OUTPUT] * rows)
    processed = oracle(states[0].params)(history, logits.clone())
    probabilities = processed.double().softmax(-1).numpy()
    u = uniforms([stream_state(s.params.seed) for s in states], [len(OUTPUT)] * rows)
    for row, token in enumerate(drawn):
        assert token in drawable(probabilities[row], u[row])
