"""Changes to the model's logits before temperature: bias, penalties, masks of stop tokens and grammars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from diptych.engine.sampling.state import SamplingState

_MASKS = torch.from_numpy(
    np.where(
        np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
    ).astype(np.float32)
)
"""[256, 8]: what is added to the logits of the eight tokens whose bits are in one octet, lowest first."""


def edit_logits(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Apply each row's edits to `logits` [R, V] in place, in this order: logit bias, repetition penalty,
    presence and frequency penalties, minimum length, grammar. Options that no row uses cost nothing."""
    _add_bias(logits, states)
    _penalise_repetition(logits, states)
    _penalise_output_counts(logits, states)
    _mask_stop_tokens(logits, states)
    _mask_outside_grammar(logits, states)


def _add_bias(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    rows = [row for row, state in enumerate(states) if state.bias_ids.size]
    if rows:
        index = _flat_index(logits, rows, [states[row].bias_ids for row in rows])
        values = torch.from_numpy(np.concatenate([states[row].bias_values for row in rows]))
        logits.view(-1).index_add_(0, index, values.to(logits.device))


def _mask_stop_tokens(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    rows = [row for row, state in enumerate(states) if state.stops_masked and state.grammar is None]
    if rows:
        index = _flat_index(logits, rows, [states[row].stop_ids for row in rows])
        logits.view(-1).index_fill_(0, index, float("-inf"))


def _mask_outside_grammar(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Last, so that nothing brings back a token that the grammar forbids."""
    matchers = {row: (state, state.grammar) for row, state in enumerate(states) if state.grammar is not None}
    if matchers:
        rows = list(matchers)
        packed = np.stack([grammar.allowed(go_on=state.goes_on) for state, grammar in matchers.values()])
        octets = torch.from_numpy(packed.view(np.uint8).astype(np.int32)).to(logits.device)
        # Several times as fast as a mask of booleans on a CPU.
        added = torch.nn.functional.embedding(octets, _MASKS.to(logits.device))
        added = added.view(len(rows), -1)[:, : logits.shape[1]]
        if len(rows) == len(states):
            logits += added
        else:
            logits[rows] += added


def _flat_index(logits: torch.Tensor, rows: Sequence[int], ids: Sequence[np.ndarray]) -> torch.Tensor:
    """Positions of tokens `ids[i]` of row `rows[i]` in the flattened logits."""
    width = logits.shape[1]
    flat = np.concatenate([row * width + row_ids for row, row_ids in zip(rows, ids, strict=True)])
    return torch.from_numpy(flat).to(logits.device)


def _penalise_repetition(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Keskar et al., "CTRL", 2019, in the form everyone uses: a seen token's logit is divided by the
    penalty if positive and multiplied by it if negative."""
    seen = {row: state.seen for row, state in enumerate(states) if state.seen is not None}
    if seen:
        rows = list(seen)
        chosen = logits[rows]
        penalty = _column(logits, [states[row].params.repetition_penalty for row in rows])
        penalised = torch.where(chosen < 0, chosen * penalty, chosen / penalty)
        logits[rows] = torch.where(torch.stack(list(seen.values())), penalised, chosen)


def _penalise_output_counts(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """OpenAI's definition: logit -= count * frequency_penalty + (count > 0) * presence_penalty."""
    by_row = {row: state.counts for row, state in enumerate(states) if state.counts is not None}
    if by_row:
        rows = list(by_row)
        counts = torch.stack(list(by_row.values()))
        frequency = _column(logits, [states[row].params.frequency_penalty for row in rows])
        presence = _column(logits, [states[row].params.presence_penalty for row in rows])
        logits[rows] -= counts * frequency + (counts > 0) * presence


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
