"""Tiny random models, saved by `transformers` and run through our decoder over a paged slab."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from diptych.engine.models.decoder import DecoderLM
from diptych.kernels.interface import AttentionBackend, AttentionStep
from diptych.kernels.registry import make_attention_backend


class PagedRunner:
    """Runs steps of several sequences whose pages are scattered over one slab."""

    def __init__(self, model: DecoderLM, *, page_size: int, backend: str = "torch_native") -> None:
        config = model.config
        self.model = model
        self.page_size = page_size
        self.lengths: dict[str, int] = {}
        self.pages: dict[str, list[int]] = {}
        num_pages = 1 + 512 // page_size
        # Page 0 pads the tables: nothing may depend on what it holds.
        self.free = (torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(7)) + 1).tolist()
        slab = torch.zeros(
            num_pages,
            config.num_layers,
            2,
            config.num_kv_heads,
            page_size,
            config.head_dim,
            dtype=model.dtype,
        )
        slab[0] = 100.0
        self.backend: AttentionBackend = make_attention_backend(
            backend, slab, num_q_heads=config.num_q_heads, scale=config.scale
        )

    def step(self, new_tokens: dict[str, list[int]], *, decode: bool = False) -> dict[str, torch.Tensor]:
        """Logits [new tokens, vocab] of each sequence."""
        pages, offsets, positions = [], [], []
        for name, tokens in new_tokens.items():
            start = self.lengths.get(name, 0)
            self.lengths[name] = start + len(tokens)
            table = self.pages.setdefault(name, [])
            while len(table) * self.page_size < self.lengths[name]:
                table.append(self.free.pop())
            for position in range(start, self.lengths[name]):
                pages.append(table[position // self.page_size])
                offsets.append(position % self.page_size)
                positions.append(position)
        width = max(len(self.pages[name]) for name in new_tokens)
        tables = [self.pages[name] + [0] * (width - len(self.pages[name])) for name in new_tokens]
        step = AttentionStep(
            is_decode=decode,
            query_lens=[len(tokens) for tokens in new_tokens.values()],
            seq_lens=[self.lengths[name] for name in new_tokens],
            page_table=torch.tensor(tables),
            token_pages=torch.tensor(pages),
            token_offsets=torch.tensor(offsets),
            positions=torch.tensor(positions),
        )
        ids = torch.tensor([token for tokens in new_tokens.values() for token in tokens])
        logits = self.model.logits(self.model.forward(ids, step, self.backend))
        return dict(zip(new_tokens, logits.split(step.query_lens), strict=True))


@pytest.fixture
def save_reference(tmp_path: Path):
    """config → (the `transformers` model in float32, the directory it is saved in)."""

    def save(config: PreTrainedConfig, **how: object) -> tuple[PreTrainedModel, Path]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norms that are all ones and biases that are all zeros would hide a missing one.
                if name.endswith("norm.weight") or name.endswith(".bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.mul_(4.0)
        model.save_pretrained(tmp_path / "model", **how)
        return model, tmp_path / "model"

    return save


@pytest.fixture
def paged_runner() -> type[PagedRunner]:
    return PagedRunner
