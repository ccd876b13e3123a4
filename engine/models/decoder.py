"""The forward pass of the Llama family, for inference only: no autograd, no modules, fused projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diptych.engine.models.config import ModelConfig
from diptych.engine.models.layer import DecoderLayer, EagerHalves, LayerHalves
from diptych.engine.models.linear import Linear
from diptych.engine.models.rope import RotaryEmbedding
from diptych.kernels.interface import AttentionBackend, AttentionStep
from diptych.kernels.pointwise import make_pointwise


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
        batch_invariant: bool = True,
        torch_compile: bool = False,
    ) -> None:
        """`embedding`: [vocab, hidden], whose dtype and device are the model's. `batch_invariant`: a
        request's results are the same bits alone and in any batch. `torch_compile`: compile the layers, now;
        raises `UnsupportedModelError` where that can't be done."""
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.linear_backend = linear_backend
        """The concrete backend of the linear layers, for the runner's stamp."""
        self.batch_invariant = batch_invariant
        self.torch_compile = torch_compile
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._halves: LayerHalves
        if torch_compile:
            # Imported where it is wanted: the compiler takes a second to import.
            from diptych.engine.models.compiled import CompiledHalves

            self._halves = CompiledHalves(
                config, layers[0], dtype=self.dtype, device=self.device, lone_rows=not batch_invariant
            )
        else:
            self._halves = EagerHalves(config, make_pointwise(self.device, self.dtype))
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
        tokens = len(input_ids)
        cos, sin = self._rotary.table(self._pair_up(step.positions))
        backend.begin_step(step)
        # The residual stream stays in float32: rounding it to bfloat16 at each of the 2 · layers additions
        # is the largest error of a half-precision forward (a quarter of it, measured on the default model).
        residual = self._pair_up(F.embedding(input_ids, self._embedding).to(torch.float32))
        delta = torch.zeros_like(residual, dtype=self.dtype)
        for index, layer in enumerate(self._layers):
            q, k, v = self._halves.before_attention(layer, residual, delta, cos, sin)
            if len(q) != tokens:
                q, k, v = q[:tokens], k[:tokens], v[:tokens]
            x = self._pair_up(backend.attend(index, q, k, v))
            if rows is not None and index == len(self._layers) - 1:
                # Behind the last attention a token matters to nobody but itself.
                if not rows:
                    return residual[:0]
                x, residual = self._pair_up(x[rows]), self._pair_up(residual[rows])
            delta = self._halves.after_attention(layer, residual, x)
        hidden = F.rms_norm(
            residual.add_(delta), self._final_norm.shape, self._final_norm, self.config.rms_norm_eps
        )
        return hidden[: tokens if rows is None else len(rows)]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden] (the rows of `forward`'s result that need them) → [M, vocab] float32."""
        return self._lm_head(self._pair_up(hidden))[: len(hidden)]

    def _pair_up(self, x: torch.Tensor) -> torch.Tensor:
        """A lone row goes through the matrix products as two equal ones; the caller drops the second.

        Libraries sum a single row in another order than the rows of a batch (oneDNN: seen for 1,536 inputs):
        a request would get other bits alone than in company, and one seed would draw other tokens."""
        return torch.cat((x, x)) if self.batch_invariant and len(x) == 1 else x
