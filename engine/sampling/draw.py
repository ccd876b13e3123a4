"""Drawing one token per row from temperature-scaled logits, with top_k, top_p and min_p.

Every draw inverts the cumulative distribution at one given uniform number. Tokens are laid out by id, not
by probability: noise of 1e-6 in the logits then moves each boundary by about 1e-6 and so changes a draw that
rarely, while in order of probability near-equal tokens would swap places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from diptych.engine.sampling.top import exact_top
from diptych.engine.wire import SamplingParams

_BLOCK = 256
_CANDIDATES = (256, 4096)
"""How many of the likeliest tokens to sort before falling back to the whole vocabulary. Real
distributions have 95 % of their mass in a few dozen tokens; a full sort costs 2 ms a row on a CPU core."""
_BELOW_ONE = 1.0 - 2.0**-52


def scale(logits: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """Logits [R, V] over temperature, shifted so that each row's maximum is 0 (any temperature is then
    free of overflow). Works in place and returns `logits`."""
    logits -= logits.amax(-1, keepdim=True)
    logits /= torch.tensor(temperatures, dtype=logits.dtype, device=logits.device).unsqueeze(1)
    return logits


def draw_unfiltered(scaled: torch.Tensor, params: Sequence[SamplingParams], u: torch.Tensor) -> torch.Tensor:
    """Draw from whole rows, `min_p` applied: scaled logits [R, V] (overwritten), u [R] float64 in [0, 1)
    -> token ids [R] int64. Sorts nothing."""
    if any(p.min_p > 0.0 for p in params):
        scaled.masked_fill_(scaled < _min_p_floor(scaled, params), float("-inf"))
    weights = scaled.exp_()
    rows, width = weights.shape
    if width % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - width % _BLOCK))
    # Two levels, so that only R * (V / 256 + 256) numbers need the slow, exact float64 running sum.
    blocks = weights.view(rows, -1, _BLOCK)
    cumulative = blocks.sum(-1).double().cumsum(-1)
    target = u * cumulative[:, -1]
    block = _first_above(cumulative, target)
    before = torch.nn.functional.pad(cumulative, (1, 0)).gather(-1, block.unsqueeze(1)).squeeze(1)
    inside = blocks[torch.arange(rows, device=u.device), block].double().cumsum(-1)
    return block * _BLOCK + _first_above(inside, target - before)


def draw_filtered(scaled: torch.Tensor, params: Sequence[SamplingParams], u: torch.Tensor) -> torch.Tensor:
    """Like `draw_unfiltered`, for rows of which each uses `top_k` or `top_p`. Applied in this order:

    - `top_k` keeps the k likeliest tokens; on ties at the cut, those of lowest id.
    - `top_p` keeps the fewest likeliest tokens whose share of what is left reaches p, at least one.
    - `min_p` keeps tokens at least min_p times as likely as the likeliest.
    """
    width = scaled.shape[1]
    drawn = torch.empty(len(params), dtype=torch.int64, device=scaled.device)
    pending = list(range(len(params)))
    for size in (*(c for c in _CANDIDATES if c < width), width):
        rows = [row for row in pending if size == width or not size < params[row].top_k < width]
        if not rows:
            continue
        index = torch.tensor(rows, device=scaled.device)
        some = scaled if len(rows) == len(params) else scaled.index_select(0, index)
        tokens, enough = _draw_from_top(some, [params[row] for row in rows], u[index], size)
        drawn[index] = tokens
        settled = {row for row, ok in zip(rows, enough.tolist(), strict=True) if ok}
        pending = [row for row in pending if row not in settled]
        if not pending:
            break
    return drawn


def _draw_from_top(
    scaled: torch.Tensor, params: Sequence[SamplingParams], u: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the `size` likeliest tokens: (token ids [R], whether that many were enough [R] bool)."""
    width = scaled.shape[1]
    top_ks = [p.top_k if 0 < p.top_k < width else width for p in params]
    size = min(size, max(top_ks))
    top, ids = exact_top(scaled, size)
    weights = top.double().exp_()
    cumulative = weights.cumsum(-1)
    top_k = torch.tensor(top_ks, device=u.device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=u.device)
    # The mass that top_p is a share of: what top_k left, or the whole row.
    total = cumulative.gather(-1, (top_k.clamp(max=size) - 1).unsqueeze(1)).squeeze(1)
    if size < max(top_ks):
        total = torch.where(top_k <= size, total, scaled.exp().sum(-1).double())
    wanted = top_p * total
    enough = (top_k <= size) | (cumulative[:, -1] >= wanted)

    keep = torch.arange(size, device=u.device) < top_k.unsqueeze(1)
    # A token stays if the likelier ones before it don't reach p. With top_p off that is all of them,
    # whatever rounding says.
    before = cumulative - weights
    keep &= (before < wanted.unsqueeze(1)) | (top_p >= 1.0).unsqueeze(1)
    keep[:, 0] = True
    if any(p.min_p > 0.0 for p in params):
        keep &= top >= _min_p_floor(scaled, params)

    ids, order = ids.sort(dim=-1)
    by_id = (weights * keep).gather(-1, order).cumsum(-1)
    return ids.gather(-1, _first_above(by_id, u * by_id[:, -1]).unsqueeze(1)).squeeze(1), enough


def _min_p_floor(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """[R, 1]: the lowest scaled logit that min_p keeps, given that each row's maximum is 0."""
    floors = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
    return torch.tensor(floors, dtype=scaled.dtype, device=scaled.device).unsqueeze(1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index of each row whose running sum exceeds the target: [R, N] float64, [R] -> [R]. Always an
    entry of non-zero weight: a target that rounding put at or over the total means the last such entry."""
    target = torch.minimum(target, cumulative[:, -1] * _BELOW_ONE)
    index = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return index.clamp_(max=cumulative.shape[1] - 1)
