"""The forward pass of the Llama family, for inference only: no autograd, no modules, fused projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from diptych.engine.models.config import ModelConfig
from diptych.engine.models.linear import Linear
from diptych.engine.models.rope import RotaryEmbedding
from diptych.kernels.interface import AttentionBackend, AttentionStep
from diptych.kernels.pointwise import make_pointwise


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Norm weights are [hidden] ([head_dim] for q and k) in float32."""

    input_norm: torch.Tensor
    qkv: Linear
    """[hidden] → [(q_heads + 2 · kv_heads) · head_dim]: q, k, v in this order."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    """[hidden] → [2 · intermediate]: gate, then up."""
    down: Linear


class DecoderLM:
    """Immutable once built; holds no state between steps (KV lives in the attention backend's slab)."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        final_norm: torch.Tensor,
        lm_head: Linear,
        linear_backend: str,
    ) -> None:
        """`embedding`: [vocab, hidden], whose dtype and device are the model's."""
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.linear_backend = linear_backend
        """The concrete backend of the linear layers, for the runner's stamp."""
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._ops = make_pointwise(self.device, self.dtype)
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, self.device)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        step: AttentionStep,
        backend: AttentionBackend,
        *,
        rows: list[int] | None = None,
    ) -> torch.Tensor:
        """`input_ids` [N] int64, the new tokens of all sequences in `step`'s order; their K and V are
        stored through `backend`. `rows`: the tokens whose hidden state is wanted; None for all.
        Returns the float32 hidden states [R, hidden] after the final norm, in the order of `rows`."""
        cos, sin = self._rotary.table(step.positions)
        backend.begin_step(step)
        # The residual stream stays in float32: rounding it to bfloat16 at each of the 2 · layers additions
        # is the largest error of a half-precision forward (a quarter of it, measured on the default model).
        residual = _pair_up(F.embedding(input_ids, self._embedding).to(torch.float32))
        delta = torch.zeros_like(residual, dtype=self.dtype)
        for index, layer in enumerate(self._layers):
            x = self._add_norm(residual, delta, layer.input_norm)
            x = self._attention(index, layer, x, cos, sin, backend)
            if rows is not None and index == len(self._layers) - 1:
                # Behind the last attention a token matters to nobody but itself.
                if not rows:
                    return residual[:0]
                x, residual = _pair_up(x[rows]), _pair_up(residual[rows])
            x = self._add_norm(residual, layer.o(x), layer.post_norm)
            delta = layer.down(self._ops.silu_and_multiply(layer.gate_up(x)))
        hidden = F.rms_norm(
            residual.add_(delta), self._final_norm.shape, self._final_norm, self.config.rms_norm_eps
        )
        return hidden[: len(input_ids) if rows is None else len(rows)]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden] (the rows of `forward`'s result that need them) → [M, vocab] float32."""
        return self._lm_head(_pair_up(hidden))[: len(hidden)]

    def _add_norm(self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.add_rms_norm(residual, delta, weight, self.config.rms_norm_eps)

    def _attention(
        self,
        index: int,
        layer: DecoderLayer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """[N, hidden] → [N, q_heads · head_dim], before the output projection."""
        config = self.config
        q_heads, kv_heads = config.num_q_heads, config.num_kv_heads
        tokens = len(cos)
        qkv = layer.qkv(x)[:tokens].view(-1, q_heads + 2 * kv_heads, config.head_dim)
        q, k, v = qkv.split((q_heads, kv_heads, kv_heads), 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._ops.rotate(self._ops.rms_norm(q, layer.q_norm, config.rms_norm_eps), cos, sin)
            k = self._ops.rotate(self._ops.rms_norm(k, layer.k_norm, config.rms_norm_eps), cos, sin)
        else:
            # q and k lie side by side: one rotation for both.
            q, k = self._ops.rotate(qkv[:, : q_heads + kv_heads], cos, sin).split((q_heads, kv_heads), 1)
        return _pair_up(backend.attend(index, q, k, v))


def _pair_up(x: torch.Tensor) -> torch.Tensor:
    """A lone row goes through the matrix products as two equal ones; the caller drops the second.

    Libraries sum a single row in another order than the rows of a batch (oneDNN: seen for 1,536 inputs), so a
    request would get other bits alone than in company, and one seed would draw other tokens."""
    return torch.cat((x, x)) if len(x) == 1 else x
