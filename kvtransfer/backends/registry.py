"""Backends by the name users give to `--disaggregation-transfer-backend`."""

from __future__ import annotations

import torch

from diptych.kvtransfer.backends.interface import TransferBackend


def make_backend(
    name: str, slab: torch.Tensor, *, page_bytes: int, agent: str, options: dict[str, object] | None = None
) -> TransferBackend:
    """Raises `TransferError` for an unknown name or a library that isn't installed."""
    raise NotImplementedError
