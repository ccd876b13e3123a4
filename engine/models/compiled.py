"""A layer's two halves through `torch.compile`.

Attention stays outside: its backends read and write pages through pointers and page tables, which a compiler
can't see into. The halves see a layer's weights as arguments, so that all layers of a model share one
compilation, and their rows are of any number from two on, so that no length compiles again. (One row is a
compilation of its own; it happens only without batch invariance.)
"""

from __future__ import annotations

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.exc import TorchDynamoException

from diptych.engine.models.config import ModelConfig
from diptych.engine.models.errors import UnsupportedModelError
from diptych.engine.models.layer import DecoderLayer, EagerHalves
from diptych.kernels.pointwise import TorchPointwise

# What the compiler takes as the usual number of rows. Fixed, so that every worker gets the same code, and the
# same bits from it.
USUAL_ROWS = 16


class CompiledHalves:
    """Compiled once constructed: no request waits for the compiler."""

    def __init__(
        self,
        config: ModelConfig,
        layer: DecoderLayer,
        *,
        dtype: torch.dtype,
        device: torch.device,
        lone_rows: bool,
    ) -> None:
        """`layer`: any one of the model's. `lone_rows`: whether steps may have a single row.
        Raises `UnsupportedModelError` where PyTorch can't compile, as without a C++ compiler."""
        # Plain PyTorch inside: what the compiler is to fuse it must see.
        halves = EagerHalves(config, TorchPointwise())
        # Isolated: another model in this process, of other sizes, must not make these ones variable here.
        self.before_attention = torch.compile(  # type: ignore[call-overload]  # the newest option isn't typed
            halves.before_attention, fullgraph=True, isolate_recompiles=True
        )
        self.after_attention = torch.compile(  # type: ignore[call-overload]
            halves.after_attention, fullgraph=True, isolate_recompiles=True
        )
        # The compiler's worker processes would outlive a killed scheduler: compile in this one.
        with inductor_config.patch(compile_threads=1):
            try:
                self._run(config, layer, dtype, device, USUAL_ROWS)
                if lone_rows:
                    self._run(config, layer, dtype, device, 1)
            except TorchDynamoException as error:
                reason = next((line for line in str(error).splitlines() if line.strip()), "")
                raise UnsupportedModelError(
                    f"--enable-torch-compile: PyTorch can't compile the model's layers here: {reason}"
                ) from error

    @torch.inference_mode()
    def _run(
        self, config: ModelConfig, layer: DecoderLayer, dtype: torch.dtype, device: torch.device, rows: int
    ) -> None:
        residual = torch.zeros(rows, config.hidden_size, dtype=torch.float32, device=device)
        delta = torch.zeros(rows, config.hidden_size, dtype=dtype, device=device)
        x = torch.zeros(rows, config.num_q_heads * config.head_dim, dtype=dtype, device=device)
        cos = torch.zeros(rows, 1, config.head_dim, dtype=torch.float32, device=device)
        sin = torch.zeros_like(cos)
        if rows > 1:
            for tensor in (residual, delta, x, cos, sin):
                torch._dynamo.mark_dynamic(tensor, 0)
        self.before_attention(layer, residual, delta, cos, sin)
        self.after_attention(layer, residual, x)
