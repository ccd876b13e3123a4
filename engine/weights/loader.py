"""From tensors to a `DecoderLM`: cast, fuse, pack, layer by layer: memory peaks near one model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from diptych.engine.models.config import ModelConfig
from diptych.engine.models.decoder import DecoderLM
from diptych.engine.models.errors import InvalidModelError, UnsupportedModelError
from diptych.engine.models.layer import DecoderLayer
from diptych.engine.models.linear import Linear, make_head, make_linear, resolve_linear_backend
from diptych.engine.weights.tensors import DummySource, SafetensorsSource, TensorSource

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
Progress = Callable[[int, int], None]
"""Called with (layers loaded, layers in all)."""


def load_model(
    model_dir: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str = "auto",
    linear_backend: str = "auto",
    seed: int = 0,
    batch_invariant: bool = True,
    torch_compile: bool = False,
    progress: Progress | None = None,
) -> DecoderLM:
    """`model_dir`: as `prepare_model` returns it. `gguf` means the same as `safetensors` here, since
    `prepare_model` has converted the file by then; `dummy` needs config.json only and draws from `seed`.
    `batch_invariant`, `torch_compile`: see `DecoderLM`.

    Raises `InvalidModelError` (naming missing, unexpected or misshapen tensors), `UnsupportedModelError`.
    """
    if load_format not in LOAD_FORMATS:
        raise UnsupportedModelError(
            f"load format {load_format!r} is unknown; known: {', '.join(LOAD_FORMATS)}"
        )
    directory = Path(model_dir)
    config = ModelConfig.from_dir(directory)
    target = torch.device(device)
    backend = resolve_linear_backend(linear_backend, target, dtype)
    source: TensorSource = DummySource(seed) if load_format == "dummy" else SafetensorsSource(directory)
    with torch.inference_mode(), source:
        tied = _check_names(config, source.names(), directory)
        builder = _Builder(config, source, target, dtype, backend)
        layers = []
        for index in range(config.num_layers):
            layers.append(builder.layer(index))
            if progress is not None:
                progress(index + 1, config.num_layers)
        embedding = builder.embedding()
        return DecoderLM(
            config,
            embedding=embedding,
            layers=layers,
            final_norm=builder.vector("model.norm.weight", config.hidden_size),
            lm_head=builder.lm_head(embedding if tied else None),
            linear_backend=backend,
            batch_invariant=batch_invariant,
            torch_compile=torch_compile,
        )


def expected_tensors(config: ModelConfig) -> Iterator[str]:
    """Names of a checkpoint of this model, in the naming of `transformers`; without `lm_head.weight`."""
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    biases = dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.qkv_bias)
    biases |= {"o_proj": config.o_bias}
    biases |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), config.mlp_bias)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight"
        yield prefix + "post_attention_layernorm.weight"
        if config.qk_norm:
            yield prefix + "self_attn.q_norm.weight"
            yield prefix + "self_attn.k_norm.weight"
        for name, has_bias in biases.items():
            part = "mlp." if name in ("gate_proj", "up_proj", "down_proj") else "self_attn."
            yield f"{prefix}{part}{name}.weight"
            if has_bias:
                yield f"{prefix}{part}{name}.bias"


def _check_names(config: ModelConfig, names: set[str] | None, directory: Path) -> bool:
    """Returns whether the LM head is the embedding."""
    if names is None or config.tie_embeddings:
        optional, tied = {"lm_head.weight"}, config.tie_embeddings
    else:
        optional, tied = set(), False
    if names is None:
        return tied
    expected = set(expected_tensors(config)) | ({"lm_head.weight"} - optional)
    # Old checkpoints carry the rotary frequencies, which are computed from the configuration.
    present = {name for name in names if not name.endswith("rotary_emb.inv_freq")}
    problems = []
    if missing := sorted(expected - present):
        problems.append(f"missing {_some(missing)}")
    if unexpected := sorted(present - expected - optional):
        problems.append(f"unexpected {_some(unexpected)}")
    if problems:
        raise InvalidModelError(
            f"the weights in {directory} don't fit {config.architecture} as its config.json describes it: "
            + "; ".join(problems)
        )
    return tied


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


class _Builder:
    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        device: torch.device,
        dtype: torch.dtype,
        linear_backend: str,
    ) -> None:
        self._config = config
        self._source = source
        self._device = device
        self._dtype = dtype
        self._linear_backend = linear_backend

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}."
        q_size = config.num_q_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return DecoderLayer(
            input_norm=self.vector(prefix + "input_layernorm.weight", hidden),
            qkv=self.linear(
                {attention + "q_proj": q_size, attention + "k_proj": kv_size, attention + "v_proj": kv_size},
                hidden,
                config.qkv_bias,
            ),
            q_norm=self.vector(attention + "q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self.vector(attention + "k_norm.weight", config.head_dim) if config.qk_norm else None,
            o=self.linear({attention + "o_proj": hidden}, q_size, config.o_bias),
            post_norm=self.vector(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self.linear({mlp + "gate_proj": inner, mlp + "up_proj": inner}, hidden, config.mlp_bias),
            down=self.linear({mlp + "down_proj": hidden}, inner, config.mlp_bias),
        )

    def embedding(self) -> torch.Tensor:
        return self._fused({"model.embed_tokens.weight": self._config.vocab_size}, self._config.hidden_size)

    def lm_head(self, embedding: torch.Tensor | None) -> Linear:
        """`embedding`: the table to share, if tied. A packed head copies it: lookups need rows."""
        weight = embedding
        if weight is None:
            weight = self._fused({"lm_head.weight": self._config.vocab_size}, self._config.hidden_size)
        return make_head(self._linear_backend, weight)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A norm's weight, in float32 as norms are computed."""
        return self._fused({name: size}, None).to(torch.float32)

    def linear(self, parts: dict[str, int], inputs: int, bias: bool) -> Linear:
        """`parts`: name without `.weight` → output size; they are stacked in this order."""
        weight = self._fused({f"{name}.weight": size for name, size in parts.items()}, inputs)
        stacked_bias = None
        if bias:
            stacked_bias = self._fused({f"{name}.bias": size for name, size in parts.items()}, None)
        return make_linear(self._linear_backend, weight, stacked_bias)

    def _fused(self, parts: dict[str, int], inputs: int | None) -> torch.Tensor:
        """Stacks tensors [size, inputs] (or [size], for `inputs` None) in the model's dtype and device."""
        tail = () if inputs is None else (inputs,)
        out = torch.empty((sum(parts.values()), *tail), dtype=self._dtype, device=self._device)
        first = 0
        for name, size in parts.items():
            out[first : first + size].copy_(self._source.get(name, (size, *tail)))
            first += size
        return out
