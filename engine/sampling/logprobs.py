"""Log-probabilities of the model's own distribution, before bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.sampling.top import exact_top
from diptych.engine.wire import TokenLogprob

_ROWS_AT_ONCE = 64
"""Bounds the temporary copy: a long prompt's logits are hundreds of megabytes already."""


def token_logprobs(logits: torch.Tensor, targets: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Logits [R, V]; row i gives the natural log-probability of token `targets[i]` and of its `tops[i]`
    likeliest tokens, best first, equals by rising id. The logits are left as they are."""
    result: list[TokenLogprob] = []
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        result += _some_logprobs(logits[rows], targets[rows], tops[rows])
    return result


def prompt_logprobs(logits: torch.Tensor, targets: Sequence[int], top: int) -> list[TokenLogprob]:
    """Logits [T, V] of T consecutive prompt positions and the tokens that followed them; `top` likeliest
    alternatives each. Raises ValueError if the lengths differ."""
    if logits.shape[0] != len(targets):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(targets)} target tokens")
    return token_logprobs(logits, targets, [top] * len(targets))


def _some_logprobs(logits: torch.Tensor, targets: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    index = torch.tensor(targets, dtype=torch.int64, device=logits.device).unsqueeze(1)
    chosen = logprobs.gather(-1, index).squeeze(1).tolist()
    width = max(tops)
    if width == 0:
        return [TokenLogprob(token, value) for token, value in zip(targets, chosen, strict=True)]
    # Ranked by the logits: log_softmax may round two of them to the same value.
    _, ids = exact_top(logits, width)
    best_ids, best = ids.tolist(), logprobs.gather(-1, ids).tolist()
    return [
        TokenLogprob(token, value, list(zip(row_ids[:top], row[:top], strict=True)))
        for token, value, row_ids, row, top in zip(targets, chosen, best_ids, best, tops, strict=True)
    ]
