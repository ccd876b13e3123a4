"""One decoder layer's weights, and what it computes around attention: before it, and after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from diptych.engine.models.config import ModelConfig
from diptych.engine.models.linear import Linear
from diptych.kernels.pointwise import PointwiseOps


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


class LayerHalves(Protocol):
    """The two halves of a layer, the same code for every layer. `residual` [N, hidden] float32 is the stream
    that layers add to, and is added to in place."""

    def before_attention(
        self,
        layer: DecoderLayer,
        residual: torch.Tensor,
        delta: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`delta` [N, hidden]: what the layer before adds to the stream. `cos`, `sin` [N, 1, head_dim].
        Returns q [N, q_heads, head_dim], k and v [N, kv_heads, head_dim], rotated."""
        ...

    def after_attention(self, layer: DecoderLayer, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`x` [N, q_heads · head_dim], what attention gave. Returns the next `delta` [N, hidden]."""
        ...


class EagerHalves:
    def __init__(self, config: ModelConfig, ops: PointwiseOps) -> None:
        self._eps = config.rms_norm_eps
        self._q_heads, self._kv_heads = config.num_q_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._ops = ops

    def before_attention(
        self,
        layer: DecoderLayer,
        residual: torch.Tensor,
        delta: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ops, q_heads, kv_heads = self._ops, self._q_heads, self._kv_heads
        x = ops.add_rms_norm(residual, delta, layer.input_norm, self._eps)
        qkv = layer.qkv(x).view(-1, q_heads + 2 * kv_heads, self._head_dim)
        q, k, v = qkv.split((q_heads, kv_heads, kv_heads), 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rotate(ops.rms_norm(q, layer.q_norm, self._eps), cos, sin)
            k = ops.rotate(ops.rms_norm(k, layer.k_norm, self._eps), cos, sin)
        else:
            # q and k lie side by side: one rotation for both.
            q, k = ops.rotate(qkv[:, : q_heads + kv_heads], cos, sin).split((q_heads, kv_heads), 1)
        return q, k, v

    def after_attention(self, layer: DecoderLayer, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = self._ops.add_rms_norm(residual, layer.o(x), layer.post_norm, self._eps)
        return layer.down(self._ops.silu_and_multiply(layer.gate_up(x)))
