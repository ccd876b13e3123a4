"""Random steps over a scattered slab, and a dense reference that knows nothing of pages."""

from __future__ import annotations

import pytest
import torch

from diptych.kernels.interface import AttentionBackend, AttentionStep


class Case:
    """Sequences with a stored prefix and new tokens. Slots that no token is stored in hold large values:
    they must not show in any result."""

    def __init__(
        self,
        *,
        query_lens: list[int],
        seq_lens: list[int],
        page_size: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        layers: int = 2,
    ) -> None:
        rand = torch.Generator().manual_seed(len(seq_lens) + sum(seq_lens) + page_size)
        self.query_lens, self.seq_lens, self.page_size = query_lens, seq_lens, page_size
        self.scale = head_dim**-0.5
        self.q_heads = q_heads
        counts = [-(-length // page_size) for length in seq_lens]
        num_pages = sum(counts) + 5
        order = (torch.randperm(num_pages - 1, generator=rand) + 1).tolist()
        self.slab = torch.full((num_pages, layers, 2, kv_heads, page_size, head_dim), 50.0).to(dtype)
        table = torch.zeros(len(seq_lens), max(counts) + 1, dtype=torch.int64)
        pages, offsets, positions = [], [], []
        new = sum(query_lens)
        self.q = [torch.randn(new, q_heads, head_dim, generator=rand).to(dtype) for _ in range(layers)]
        # K and V of whole sequences per layer: [2, tokens, kv_heads, head_dim].
        self.kv = [
            [torch.randn(2, length, kv_heads, head_dim, generator=rand).to(dtype) for length in seq_lens]
            for _ in range(layers)
        ]
        for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            mine = [order.pop() for _ in range(counts[i])]
            table[i, : counts[i]] = torch.tensor(mine)
            for position in range(seq_len):
                page, offset = mine[position // page_size], position % page_size
                if position < seq_len - query_len:
                    for layer in range(layers):
                        self.slab[page, layer, :, :, offset] = self.kv[layer][i][:, position]
                else:
                    pages.append(page)
                    offsets.append(offset)
                    positions.append(position)
        self.step = AttentionStep(
            is_decode=all(length == 1 for length in query_lens),
            query_lens=query_lens,
            seq_lens=seq_lens,
            page_table=table,
            token_pages=torch.tensor(pages),
            token_offsets=torch.tensor(offsets),
            positions=torch.tensor(positions),
        )

    def new_kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [kv[:, length - n :] for kv, n, length in self._sequences(layer)]
        k, v = torch.cat(parts, 1).unbind(0)
        return k, v

    def _sequences(self, layer: int) -> list[tuple[torch.Tensor, int, int]]:
        return list(zip(self.kv[layer], self.query_lens, self.seq_lens, strict=True))

    def expected(self, layer: int) -> torch.Tensor:
        """Softmax attention written out in float64."""
        rows, out = 0, []
        for kv, n, length in self._sequences(layer):
            q = self.q[layer][rows : rows + n].double()
            rows += n
            k, v = kv.double().repeat_interleave(self.q_heads // kv.shape[2], 2)
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
            hidden = torch.arange(length)[None] > torch.arange(length - n, length)[:, None]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(out).flatten(1)

    def check(self, backend: AttentionBackend) -> None:
        tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[self.slab.dtype]
        before = self.slab.clone()
        backend.begin_step(self.step)
        for layer in range(len(self.q)):
            k, v = self.new_kv(layer)
            got = backend.attend(layer, self.q[layer], k, v)
            assert got.shape == (self.q[layer].shape[0], self.q_heads * self.q[layer].shape[2])
            assert got.dtype == self.q[layer].dtype
            torch.testing.assert_close(got.double(), self.expected(layer), atol=tolerance, rtol=0)
            before[self.step.token_pages, layer, 0, :, self.step.token_offsets] = k
            before[self.step.token_pages, layer, 1, :, self.step.token_offsets] = v
        assert torch.equal(self.slab, before), "a slot changed that no new token lives in"


@pytest.fixture
def case() -> type[Case]:
    return Case
