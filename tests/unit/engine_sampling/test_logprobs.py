from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from diptych.engine.sampling import Sampler, prompt_logprobs

CPU = torch.device("cpu")
WIDTH = 1000


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(150, WIDTH, generator=torch.Generator().manual_seed(0)) * 4


def reference(row: torch.Tensor) -> np.ndarray:
    x = row.numpy().astype(np.float64)
    return x - (np.log(np.exp(x - x.max()).sum()) + x.max())


def test_logprobs_are_of_the_unmodified_distribution(logits: torch.Tensor, state: Callable[..., Any]) -> None:
    options: dict[str, Any] = {"temperature": 0.3, "top_k": 3, "repetition_penalty": 2.0}
    states = [
        state(WIDTH, seed=i, logprobs=i % 4, logit_bias={7: 50.0 * (i % 2)}, **options) for i in range(8)
    ]
    for i, (token_id, logprob) in enumerate(Sampler(WIDTH, CPU).sample(logits[:8], states)):
        expected = reference(logits[i])
        assert logprob is not None
        assert logprob.token_id == token_id
        assert logprob.logprob == pytest.approx(expected[token_id], abs=1e-5)
        best = np.argsort(-expected)[: i % 4]
        assert [token for token, _ in logprob.top] == best.tolist()
        assert [value for _, value in logprob.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_only_rows_that_ask_get_logprobs(logits: torch.Tensor, state: Callable[..., Any]) -> None:
    states = [state(WIDTH, logprobs=n) for n in (None, 0, None, 5)]
    result = Sampler(WIDTH, CPU).sample(logits[:4], states)
    assert [None if r.logprob is None else len(r.logprob.top) for r in result] == [None, 0, None, 5]


def test_greedy_token_leads_the_alternatives_even_when_logits_tie(state: Callable[..., Any]) -> None:
    tied = torch.zeros(2, WIDTH)
    tied[:, [900, 30, 31, 500]] = 2.0
    states = [state(WIDTH, temperature=0.0, logprobs=n) for n in (3, 6)]
    first, second = Sampler(WIDTH, CPU).sample(tied, states)
    assert first.logprob is not None
    assert second.logprob is not None
    assert first.token_id == 30
    assert [token for token, _ in first.logprob.top] == [30, 31, 500]
    assert [token for token, _ in second.logprob.top] == [30, 31, 500, 900, 0, 1]


@pytest.mark.parametrize("top", [0, 1, 5, WIDTH + 10])
def test_prompt_logprobs_of_a_long_prompt(logits: torch.Tensor, top: int) -> None:
    targets = torch.randint(0, WIDTH, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    result = prompt_logprobs(logits, targets, top)
    assert [r.token_id for r in result] == targets
    for row, target, found in zip(logits, targets, result, strict=True):
        expected = reference(row)
        assert found.logprob == pytest.approx(expected[target], abs=1e-5)
        best = np.argsort(-expected)[:top]
        assert [token for token, _ in found.top] == best.tolist()
        assert [value for _, value in found.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_prompt_logprobs_of_no_positions_and_of_wrong_length(logits: torch.Tensor) -> None:
    assert prompt_logprobs(logits[:0], [], 3) == []
    with pytest.raises(ValueError, match="2 rows of logits for 3 target tokens"):
        prompt_logprobs(logits[:2], [1, 2, 3], 0)


def test_low_precision_logits_are_normalised_in_float32(logits: torch.Tensor) -> None:
    rounded = logits[:2].bfloat16()
    found = prompt_logprobs(rounded, [4, 5], 0)
    assert found[0].logprob == pytest.approx(reference(rounded[0].float())[4], abs=1e-5)
