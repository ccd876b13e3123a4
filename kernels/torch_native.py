"""Attention in plain PyTorch: runs on every device and dtype, and is the reference for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from diptych.kernels.interface import AttentionBackend, AttentionStep

MAX_MASK_ELEMENTS = 4 << 20
"""Upper bound for one causal mask; longer prefills attend in blocks of queries."""


@dataclass(frozen=True, slots=True)
class _Gather:
    """Which slab rows hold the K and V of some sequences, padded to the same number of pages."""

    rows: torch.Tensor
    """[2 · B · kv_heads · pages] int64, for layer 0."""
    batch: int
    length: int
    """Tokens, pages · page_size."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences of similar length: they share one gather."""

    members: torch.Tensor | None
    """[B] int64 indices into the step's sequences; None means all of them, in order."""
    gather: _Gather
    mask: torch.Tensor
    """[B, 1, 1, length], 0 or -inf, in the slab's dtype."""


@dataclass(frozen=True, slots=True)
class _PrefillSequence:
    start: int
    """Its first row among the step's tokens."""
    query_len: int
    seq_len: int
    gather: _Gather | None
    """None if it has no cached prefix: K and V are then taken as they come."""


class TorchNativeAttention(AttentionBackend):
    """The slab must hold finite values everywhere (allocate it zeroed): what lies behind a sequence's end on
    its last page is multiplied by zero, not skipped."""

    name: ClassVar[str] = "torch_native"
    supports_chunked_prefix: ClassVar[bool] = True

    def __init__(self, slab: torch.Tensor, *, num_q_heads: int, scale: float) -> None:
        super().__init__(slab, num_q_heads=num_q_heads, scale=scale)
        _, self._layers, _, self._kv_heads, self._page_size, self._head_dim = slab.shape
        self._group = num_q_heads // self._kv_heads
        # One row is one head's K (or V) of one page: gathering rows gives [heads, tokens, head_dim] at once.
        self._row_view = slab.view(-1, self._page_size * self._head_dim)
        cells = slab.permute(1, 2, 0, 4, 3, 5)
        # Views [pages, page_size, kv_heads, head_dim] made once: slicing per layer and step would show.
        self._k_cells = [cells[layer, 0] for layer in range(self._layers)]
        self._v_cells = [cells[layer, 1] for layer in range(self._layers)]
        device = slab.device
        self._head_rows = torch.arange(2, device=device).view(2, 1, 1, 1) * self._kv_heads + torch.arange(
            self._kv_heads, device=device
        ).view(1, 1, -1, 1)
        self._rows_per_layer = 2 * self._kv_heads
        self._where: tuple[torch.Tensor, torch.Tensor] | None = None
        self._prefill: list[_PrefillSequence] = []
        self._decode: list[_DecodeGroup] = []
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}

    def begin_step(self, step: AttentionStep) -> None:
        self._where = (step.token_pages, step.token_offsets)
        self._masks.clear()
        self._prefill, self._decode = [], []
        if step.is_decode:
            self._decode = self._decode_groups(step)
            return
        start = 0
        for index, (query_len, seq_len) in enumerate(zip(step.query_lens, step.seq_lens, strict=True)):
            gather = None
            if seq_len > query_len:
                pages = -(-seq_len // self._page_size)
                gather = self._gather_rows(step.page_table[index : index + 1, :pages])
            self._prefill.append(_PrefillSequence(start, query_len, seq_len, gather))
            start += query_len

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._where is None:
            raise RuntimeError("attend before begin_step")
        slab_dtype = self.slab.dtype
        k, v = k.to(slab_dtype), v.to(slab_dtype)
        self._k_cells[layer].index_put_(self._where, k)
        self._v_cells[layer].index_put_(self._where, v)
        if self._decode:
            return self._attend_decode(layer, q)
        # Through the slab's dtype and back, so that a prompt computes the same with a cold and a warm cache.
        return self._attend_prefill(layer, q, k.to(q.dtype), v.to(q.dtype))

    # ---- gathering ----------------------------------------------------------------------------------

    def _gather_rows(self, pages: torch.Tensor) -> _Gather:
        """`pages` [B, P]."""
        batch, count = pages.shape
        first = pages.view(1, batch, 1, count) * (self._layers * self._rows_per_layer)
        return _Gather((first + self._head_rows).reshape(-1), batch, count * self._page_size)

    def _gather(self, layer: int, gather: _Gather, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [B, kv_heads, length, head_dim]."""
        rows = gather.rows + layer * self._rows_per_layer if layer else gather.rows
        both = torch.index_select(self._row_view, 0, rows).to(dtype)
        k, v = both.view(2, gather.batch, self._kv_heads, gather.length, self._head_dim).unbind(0)
        return k, v

    # ---- decode -------------------------------------------------------------------------------------

    def _decode_groups(self, step: AttentionStep) -> list[_DecodeGroup]:
        """Lengths in pages are grouped by power of two: padding at most doubles the work."""
        by_size: dict[int, list[int]] = {}
        for index, seq_len in enumerate(step.seq_lens):
            by_size.setdefault((-(-seq_len // self._page_size) - 1).bit_length(), []).append(index)
        device = self.slab.device
        groups = []
        for indices in by_size.values():
            lengths = [step.seq_lens[i] for i in indices]
            count = -(-max(lengths) // self._page_size)
            members = None
            table = step.page_table
            if len(by_size) > 1:
                members = torch.tensor(indices, device=device)
                table = table.index_select(0, members)
            gather = self._gather_rows(table[:, :count].contiguous())
            ends = torch.tensor(lengths, device=device).view(-1, 1)
            beyond = torch.arange(gather.length, device=device).view(1, -1) >= ends
            mask = torch.zeros(beyond.shape, dtype=self.slab.dtype, device=device)
            mask = mask.masked_fill_(beyond, float("-inf")).view(len(indices), 1, 1, gather.length)
            groups.append(_DecodeGroup(members, gather, mask))
        return groups

    def _attend_decode(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        batch = q.shape[0]
        # The query heads that share a KV head become its queries: no copy of K and V per query head.
        q = q.reshape(batch, self._kv_heads, self._group, self._head_dim)
        if len(self._decode) == 1:
            return self._attend_group(layer, q, self._decode[0]).reshape(batch, -1)
        out = torch.empty_like(q)
        for group in self._decode:
            assert group.members is not None
            part = self._attend_group(layer, q.index_select(0, group.members), group)
            out.index_copy_(0, group.members, part)
        return out.view(batch, -1)

    def _attend_group(self, layer: int, q: torch.Tensor, group: _DecodeGroup) -> torch.Tensor:
        k, v = self._gather(layer, group.gather, q.dtype)
        return F.scaled_dot_product_attention(q, k, v, group.mask.to(q.dtype), scale=self.scale)

    # ---- prefill ------------------------------------------------------------------------------------

    def _attend_prefill(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape[0], self.num_q_heads, self._head_dim, dtype=q.dtype, device=q.device)
        for sequence in self._prefill:
            rows = slice(sequence.start, sequence.start + sequence.query_len)
            queries = q[rows].transpose(0, 1).unsqueeze(0)
            target = out[rows].transpose(0, 1).unsqueeze(0)
            if sequence.gather is None:
                keys = k[rows].transpose(0, 1).unsqueeze(0)
                values = v[rows].transpose(0, 1).unsqueeze(0)
                target.copy_(
                    F.scaled_dot_product_attention(
                        queries, keys, values, is_causal=True, scale=self.scale, enable_gqa=self._group > 1
                    )
                )
            else:
                keys, values = self._gather(layer, sequence.gather, q.dtype)
                self._attend_with_prefix(sequence, queries, keys, values, target)
        return out.view(q.shape[0], -1)

    def _attend_with_prefix(
        self,
        sequence: _PrefillSequence,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """`q`, `out`: [1, q_heads, query_len, head_dim]; `k`, `v`: [1, kv_heads, ≥ seq_len, head_dim]."""
        prefix = sequence.seq_len - sequence.query_len
        block = max(1, MAX_MASK_ELEMENTS // sequence.seq_len)
        for first in range(0, sequence.query_len, block):
            last = min(first + block, sequence.query_len)
            visible = prefix + last
            out[:, :, first:last] = F.scaled_dot_product_attention(
                q[:, :, first:last],
                k[:, :, :visible],
                v[:, :, :visible],
                self._causal_mask(prefix + first, last - first, visible, q),
                scale=self.scale,
                enable_gqa=self._group > 1,
            )

    def _causal_mask(self, offset: int, rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
        """[rows, columns]: row r sees the columns up to offset + r. Kept for the step's other layers."""
        key = (offset, rows, columns)
        mask = self._masks.get(key)
        if mask is None:
            mask = torch.full((rows, columns), float("-inf"), dtype=like.dtype, device=like.device)
            mask = mask.triu_(offset + 1)
            self._masks[key] = mask
        return mask
