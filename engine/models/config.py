"""What a model directory's config.json says, as far as this engine computes with it.

Read without transformers and without torch: processes that only need the context length or the layout of a
page must start in a fraction of a second.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.engine.kv_layout import KVLayout
from diptych.engine.models.errors import InvalidModelError, UnsupportedModelError
from diptych.engine.models.rope import RopeConfig, rope_from_json

logger = logging.getLogger(__name__)

SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family: RMSNorm, rotary attention with grouped queries, gated SiLU."""

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_context: int
    """Tokens, prompt and output together. A sliding window caps it: within the window the results are
    identical, beyond it they would not be."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    """What the model was trained or saved in: what `--dtype auto` means where the device can do it."""

    @property
    def scale(self) -> float:
        """Softmax scale of attention."""
        return float(self.head_dim**-0.5)

    def kv_layout(self, page_size: int, kv_dtype: str) -> KVLayout:
        """`page_size`: tokens per page; `kv_dtype`: one of `DTYPES`."""
        return KVLayout(
            num_layers=self.num_layers,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=kv_dtype,
        )

    @classmethod
    def from_dir(cls, model_dir: Path | str) -> ModelConfig:
        """Raises `InvalidModelError` or `UnsupportedModelError`."""
        directory = Path(model_dir)
        config = read_json(directory / "config.json")
        generation_file = directory / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        return model_config_from_json(config, generation)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InvalidModelError(f"{path.parent} has no {path.name}") from None
    except ValueError as error:
        raise InvalidModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidModelError(f"{path} must hold a JSON object")
    return value


def model_config_from_json(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """`generation`: contents of generation_config.json, or empty."""
    architecture = _architecture(config)
    model_type = SUPPORTED_ARCHITECTURES[architecture]
    if config.get("quantization_config"):
        raise UnsupportedModelError("quantized safetensors checkpoints are not supported")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")

    hidden_size = _integer(config, "hidden_size")
    num_q_heads = _integer(config, "num_attention_heads")
    num_kv_heads = _integer(config, "num_key_value_heads", num_q_heads)
    head_dim = _integer(config, "head_dim", 128 if model_type == "qwen3" else hidden_size // num_q_heads)
    if num_q_heads % num_kv_heads:
        raise InvalidModelError(f"{num_q_heads} query heads can't share {num_kv_heads} KV heads evenly")
    if head_dim % 2:
        raise InvalidModelError(f"head_dim {head_dim} must be even")
    if model_type == "llama" or model_type == "qwen3":
        qkv_bias = o_bias = bool(config.get("attention_bias", False))
    else:
        qkv_bias, o_bias = model_type == "qwen2", False
    max_positions = _integer(config, "max_position_embeddings", 2048)
    return ModelConfig(
        architecture=architecture,
        model_type=model_type,
        num_layers=_integer(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(config, "vocab_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope_from_json(config, max_positions),
        max_context=_capped_to_window(max_positions, _sliding_window(config, model_type)),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_token_ids(config.get("eos_token_id"), generation.get("eos_token_id")),
        bos_token_id=next(iter(_token_ids(config.get("bos_token_id"))), None),
        dtype=_dtype(config),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        by_type = {model_type: name for name, model_type in SUPPORTED_ARCHITECTURES.items()}
        if config.get("model_type") in by_type:
            return by_type[config["model_type"]]
        raise InvalidModelError(f"config.json names no architecture; supported: {supported}")
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise UnsupportedModelError(
        f"architecture {', '.join(map(str, names))} is not supported; supported: {supported}"
    )


def _integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise InvalidModelError(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


def _token_ids(*sources: object) -> tuple[int, ...]:
    """Each source is an id, a list of ids, or None; duplicates are dropped, order kept."""
    ids: list[int] = []
    for source in sources:
        for value in source if isinstance(source, list) else [source]:
            if isinstance(value, int) and value not in ids:
                ids.append(value)
    return tuple(ids)


def _dtype(config: Mapping[str, Any]) -> str:
    value = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if value not in DTYPES:
        raise UnsupportedModelError(f"dtype {value!r} is not supported; supported: {', '.join(DTYPES)}")
    return value


def _sliding_window(config: Mapping[str, Any], model_type: str) -> int | None:
    """The window in tokens, if any layer attends through one."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or model_type == "llama":
        return None
    if model_type == "mistral":
        return window
    if not config.get("use_sliding_window", False):
        return None
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        return window if "sliding_attention" in layer_types else None
    full_layers = config.get("max_window_layers", 28)
    return window if config.get("num_hidden_layers", 0) > full_layers else None


def _capped_to_window(max_positions: int, window: int | None) -> int:
    if window is None or window >= max_positions:
        return max_positions
    logger.warning(
        "the model attends through a sliding window of %d tokens: its context is capped there (it names %d)",
        window,
        max_positions,
    )
    return window
