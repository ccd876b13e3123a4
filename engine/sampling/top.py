"""Largest entries of a row, with ties broken towards the lowest token id on every device."""

from __future__ import annotations

import torch

_BLOCK = 256


def first_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's maximum, the lowest one on ties: [R, V] -> [R] int64."""
    rows, width = logits.shape
    if logits.device.type != "cpu" or width % _BLOCK:
        return logits.argmax(-1)
    # The CPU's argmax is scalar code, its amax is not: find the block first (8 times faster at V = 49k).
    blocks = logits.reshape(rows, width // _BLOCK, _BLOCK)
    block = blocks.amax(-1).argmax(-1)
    return block * _BLOCK + blocks[torch.arange(rows), block].argmax(-1)


def exact_top(values: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `n` largest entries of each row as (values, ids), both [R, min(n, V)], by falling value and then
    rising id. Unlike `torch.topk`, which of several equal values make the cut is defined: the lowest ids.
    Only of values -inf, which no draw can reach, it may be any."""
    if n >= values.shape[1]:
        top, ids = torch.sort(values, dim=-1, descending=True, stable=True)
        return top, ids
    # One more than asked tells whether equal values lie on both sides of the cut.
    top, ids = torch.topk(values, n + 1, dim=-1)
    ids, order = ids.sort(dim=-1)
    top, order = torch.sort(top.gather(-1, order), dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    if n > 0:
        tied = (top[:, n - 1] == top[:, n]) & (top[:, n] > float("-inf"))
        for row in tied.nonzero().flatten().tolist():
            candidates = (values[row] >= top[row, n]).nonzero().flatten()
            best, order = torch.sort(values[row, candidates], descending=True, stable=True)
            top[row, :n] = best[:n]
            ids[row, :n] = candidates[order[:n]]
    return top[:, :n], ids[:, :n]
