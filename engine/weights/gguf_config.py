"""GGUF metadata as the config.json that the same model has on the hub."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from diptych.engine.models.errors import InvalidModelError, UnsupportedModelError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral's files name this too; the computation is the same
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_from_gguf(
    fields: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: list[float] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (config.json, generation_config.json).

    `fields`: GGUF metadata; `shapes`: of all tensors, outermost dimension first; `rope_factors`: the divisor
    of each rotary frequency, if the file has them. Raises `UnsupportedModelError`, `InvalidModelError`.
    """
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )

    def field(name: str, default: Any = None) -> Any:
        value = fields.get(f"{architecture}.{name}", default)
        if value is None:
            raise InvalidModelError(f"the GGUF file lacks {architecture}.{name}")
        return value

    if field("expert_count", 0):
        raise UnsupportedModelError("mixture-of-experts GGUF files are not supported")
    heads = int(field("attention.head_count"))
    hidden = int(field("embedding_length"))
    if "token_embd.weight" not in shapes:
        raise InvalidModelError("the GGUF file lacks the tensor token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": int(field("feed_forward_length")),
        "num_hidden_layers": int(field("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field("attention.head_count_kv", heads)),
        "head_dim": int(field("attention.key_length", hidden // heads)),
        "vocab_size": shapes["token_embd.weight"][0],
        "max_position_embeddings": int(field("context_length")),
        # Shortest decimal of the float32 that the file stores: 1e-05, not 9.999999747378752e-06.
        "rms_norm_eps": float(f"{field('attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in shapes,
        # A quantised file has no dtype of its own; its models are trained in bfloat16.
        "dtype": "bfloat16",
        "rope_theta": float(field("rope.freq_base", 10_000.0)),
    }
    scaling = _rope_scaling(field, rope_factors, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    generation: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{name}_token_id"] = generation[f"{name}_token_id"] = int(token)
    end_of_turn = fields.get("tokenizer.ggml.eot_token_id")
    if end_of_turn is not None and end_of_turn != generation.get("eos_token_id"):
        ids = [generation["eos_token_id"]] if "eos_token_id" in generation else []
        generation["eos_token_id"] = [*ids, int(end_of_turn)]
    return config, generation


def _rope_scaling(field: Any, factors: list[float] | None, config: dict[str, Any]) -> dict[str, Any] | None:
    if factors is not None and any(factor != 1.0 for factor in factors):
        return _llama3_scaling(factors, config)
    kind = field("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(field("rope.scaling.factor"))}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": float(field("rope.scaling.factor")),
            "original_max_position_embeddings": int(field("rope.scaling.original_context_length")),
        }
    raise UnsupportedModelError(f"GGUF rope scaling {kind!r} is not supported; supported: none, linear, yarn")


def _llama3_scaling(factors: list[float], config: dict[str, Any]) -> dict[str, Any]:
    """Files carry the divisors that Llama 3's rule gives, not its parameters: take the published ones and
    check that they give the same divisors."""
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": float(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    head_dim = config["head_dim"]
    for index, given in enumerate(factors):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * index / head_dim)
        turns = 8192 / wavelength
        if turns < 1.0:
            expected = scaling["factor"]
        elif turns > 4.0:
            expected = 1.0
        else:
            smooth = (turns - 1.0) / 3.0
            expected = 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
        if not math.isclose(given, expected, rel_tol=1e-3):
            raise UnsupportedModelError("the GGUF file's rope_freqs do not follow the llama3 rule")
    return scaling
