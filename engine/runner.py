"""Runs one forward step of the model over requests' pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from diptych.engine.kv_pool import KVPool
from diptych.engine.models.decoder import DecoderLM
from diptych.engine.request import Request
from diptych.engine.sampling import prompt_logprobs
from diptych.kernels.interface import AttentionBackend, AttentionStep

# Rows of logits computed at once for prompt logprobs: bounds the [rows, vocabulary] float32 buffer.
LOGPROB_ROWS = 128


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What was constructed for this runner, stamped once. A target and a draft runner may differ."""

    prefill_attention_backend: str
    decode_attention_backend: str
    dtype: str
    kv_dtype: str
    context_length: int
    load_format: str
    linear_backend: str
    batch_invariant: bool
    torch_compile: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """`length` prompt tokens of a request, from its `num_computed` on."""

    request: Request
    length: int

    @property
    def completes_prompt(self) -> bool:
        return self.request.num_computed + self.length == self.request.num_prompt


class ModelRunner:
    """The model bound to one KV pool. `facts` is frozen; nothing here reads what the operator asked for."""

    def __init__(
        self,
        model: DecoderLM,
        pool: KVPool,
        *,
        prefill_backend: AttentionBackend,
        decode_backend: AttentionBackend,
        device: torch.device,
        facts: RunnerFacts,
    ) -> None:
        self.model = model
        self.pool = pool
        self.facts = facts
        self._prefill_backend = prefill_backend
        self._decode_backend = decode_backend
        self._device = device

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute chunks of several prompts in one step and advance their `num_computed`.

        Returns the float32 logits [R, vocab] of the last token of each chunk that completes its prompt, in
        order. Prompt logprobs are collected on the requests that ask for them.
        """
        starts = [c.request.num_computed for c in chunks]
        tokens = np.concatenate(
            [c.request.prompt_ids[s : s + c.length] for c, s in zip(chunks, starts, strict=True)]
        )
        step = self._step([c.request for c in chunks], starts, [c.length for c in chunks], is_decode=False)
        ends = np.cumsum([c.length for c in chunks])
        rows = [int(end) - 1 for c, end in zip(chunks, ends, strict=True) if c.completes_prompt]
        scored = any(c.request.params.prompt_logprobs is not None for c in chunks)
        hidden = self.model.forward(
            torch.from_numpy(tokens).to(self._device),
            step,
            self._prefill_backend,
            rows=None if scored else rows,
        )
        if scored:
            for chunk, start, end in zip(chunks, starts, ends, strict=True):
                if chunk.request.params.prompt_logprobs is not None:
                    self._collect_prompt_logprobs(chunk.request, hidden[end - chunk.length : end], start)
            hidden = hidden[rows]
        for chunk in chunks:
            chunk.request.num_computed += chunk.length
        if not rows:
            return torch.empty((0, self.model.config.vocab_size), dtype=torch.float32, device=self._device)
        return self.model.logits(hidden)

    def wait_for_kv(self) -> None:
        """Return when the pages of the last step hold their KV. Kernels of a GPU run behind the caller's
        back, and a transfer library reads memory without asking the stream."""
        if self.pool.slab.is_cuda:
            torch.cuda.current_stream(self.pool.slab.device).synchronize()

    @torch.inference_mode()
    def decode(self, requests: Sequence[Request]) -> torch.Tensor:
        """Compute the newest token of each request; returns float32 logits [B, vocab]."""
        starts = [r.num_computed for r in requests]
        assert all(s == r.num_tokens - 1 for s, r in zip(starts, requests, strict=True))
        tokens = torch.tensor([r.output_ids[-1] for r in requests], dtype=torch.int64, device=self._device)
        step = self._step(requests, starts, [1] * len(requests), is_decode=True)
        logits = self.model.logits(self.model.forward(tokens, step, self._decode_backend))
        for request in requests:
            request.num_computed += 1
        return logits

    def _step(
        self, requests: Sequence[Request], starts: list[int], lengths: list[int], *, is_decode: bool
    ) -> AttentionStep:
        page_size = self.pool.layout.page_size
        seq_lens = [s + n for s, n in zip(starts, lengths, strict=True)]
        used = [self.pool.layout.pages_for(n) for n in seq_lens]
        table = np.zeros((len(requests), max(used)), dtype=np.int64)
        for row, request, n in zip(table, requests, used, strict=True):
            row[:n] = request.pages[:n]
        if is_decode:
            positions = np.asarray(starts, dtype=np.int64)
            rows = np.arange(len(requests))
        else:
            positions = np.concatenate([np.arange(s, e) for s, e in zip(starts, seq_lens, strict=True)])
            rows = np.repeat(np.arange(len(requests)), lengths)
        return AttentionStep(
            is_decode=is_decode,
            query_lens=lengths,
            seq_lens=seq_lens,
            page_table=torch.from_numpy(table).to(self._device),
            token_pages=torch.from_numpy(table[rows, positions // page_size]).to(self._device),
            token_offsets=torch.from_numpy(positions % page_size).to(self._device),
            positions=torch.from_numpy(positions).to(self._device),
        )

    def _collect_prompt_logprobs(self, request: Request, hidden: torch.Tensor, start: int) -> None:
        """Row i of `hidden` predicts prompt token start + i + 1."""
        assert request.params.prompt_logprobs is not None
        targets = request.prompt_ids[start + 1 : start + 1 + len(hidden)]
        for first in range(0, len(targets), LOGPROB_ROWS):
            some = targets[first : first + LOGPROB_ROWS]
            logits = self.model.logits(hidden[first : first + len(some)])
            request.prompt_logprobs += prompt_logprobs(logits, some, request.params.prompt_logprobs)
