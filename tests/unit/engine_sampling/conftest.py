"""A slow, obvious sampler: one row at a time, float64, straight from the definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from diptych.engine.sampling import SamplingState
from diptych.engine.sampling.noise import stream_state, uniforms
from diptych.engine.wire import SamplingParams

EOS = 2


def make_state(
    vocab_size: int,
    prompt_ids: Sequence[int] = (1, 5, 5, 7),
    output_ids: Sequence[int] = (),
    **options: object,
) -> SamplingState:
    fields: dict[str, object] = {"max_new_tokens": 100, "seed": 0, **options}
    return SamplingState(
        SamplingParams(**fields),  # type: ignore[arg-type]
        prompt_ids,
        eos_token_ids=[EOS],
        vocab_size=vocab_size,
        device=torch.device("cpu"),
        output_ids=output_ids,
    )


def reference_distribution(
    logits: np.ndarray, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> np.ndarray:
    """Probabilities [V] float64 of the next token."""
    x = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in set(prompt_ids) | set(output_ids):
        x[token] = (
            x[token] * params.repetition_penalty if x[token] < 0 else x[token] / params.repetition_penalty
        )
    for token in set(output_ids):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(output_ids).count(token)
    if len(output_ids) < params.min_new_tokens:
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        x[sorted(stops)] = -np.inf

    ranked = sorted(range(len(x)), key=lambda t: (-x[t], t))
    if params.temperature == 0:
        return np.eye(len(x))[ranked[0]]
    probabilities = np.exp((x - x.max()) / params.temperature)
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, mass, kept = sum(probabilities[t] for t in ranked), 0.0, []
    for token in ranked:
        kept.append(token)
        mass += probabilities[token]
        if mass >= params.top_p * total and params.top_p < 1:
            break
    kept = [t for t in kept if probabilities[t] >= params.min_p * probabilities[ranked[0]]]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept]
    return result / result.sum()


def tokens_at(probabilities: np.ndarray, u: float) -> set[int]:
    """Tokens that u may draw: normally one, its neighbour too if u lies within rounding of the boundary."""
    upper = np.cumsum(probabilities)
    lower = upper - probabilities
    return set(np.flatnonzero((probabilities > 0) & (lower - 1e-6 <= u) & (u < upper + 1e-6)).tolist())


def reference_tokens(
    logits: np.ndarray, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> set[int]:
    u = uniforms([stream_state(params.seed)], [len(output_ids)])[0]
    return tokens_at(reference_distribution(logits, params, prompt_ids, output_ids), u)


@pytest.fixture
def state() -> Callable[..., SamplingState]:
    return make_state


@pytest.fixture
def allowed_tokens() -> Callable[..., set[int]]:
    return reference_tokens


@pytest.fixture
def expected_distribution() -> Callable[..., np.ndarray]:
    return reference_distribution


@pytest.fixture
def drawable() -> Callable[[np.ndarray, float], set[int]]:
    return tokens_at
