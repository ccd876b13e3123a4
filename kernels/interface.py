"""What an attention backend does, whatever computes it.

The KV pool is a page-first slab `[num_pages, num_layers, 2, kv_heads, page_size, head_dim]`; index 0 of the
third axis is K, 1 is V. A backend writes new tokens' K and V into it and attends over it through page tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Where one forward step's tokens live. Sequences are concatenated: N new tokens over B sequences.

    Two kinds: a *prefill* step (any `query_lens`, causal within the sequence) and a *decode* step (every
    query length is 1). `seq_lens[i] - query_lens[i]` tokens of sequence i are already in the slab.
    """

    is_decode: bool
    query_lens: list[int]
    """[B] new tokens of each sequence."""
    seq_lens: list[int]
    """[B] tokens of each sequence after this step."""
    page_table: torch.Tensor
    """[B, max_pages] int64 on the device; rows are padded with 0."""
    token_pages: torch.Tensor
    """[N] int64: the page each new token is stored in."""
    token_offsets: torch.Tensor
    """[N] int64: its slot within that page."""
    positions: torch.Tensor
    """[N] int64: its position in its sequence (for rotary embedding)."""


class AttentionBackend(ABC):
    """One constructed backend, bound to one slab. Not thread-safe: one scheduler loop owns it."""

    name: ClassVar[str]
    """The concrete implementation, as stamped on the runner (never an alias such as `auto`)."""
    supports_chunked_prefix: ClassVar[bool]
    """Whether a prefill step may attend to tokens stored by earlier steps."""

    def __init__(self, slab: torch.Tensor, *, num_q_heads: int, scale: float) -> None:
        """`slab`: [num_pages, num_layers, 2, kv_heads, page_size, head_dim]."""
        self.slab = slab
        self.num_q_heads = num_q_heads
        self.scale = scale

    @abstractmethod
    def begin_step(self, step: AttentionStep) -> None:
        """Prepare what all layers of this step share (gather indices, masks). Called once per step."""

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store this layer's `k`, `v` [N, kv_heads, head_dim] into the slab, then attend.

        `q`: [N, q_heads, head_dim]. Returns [N, q_heads * head_dim]. Rotary embedding is already applied.
        """
