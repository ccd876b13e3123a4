"""A model that is quick to run, and whose every output token depends on all tokens before it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from diptych.engine.weights.cache import default_cache_dir
from diptych.engine.weights.source import prepare_model
from support.cluster import MODEL

HIDDEN, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY = 64, 4, 4, 2, 64, 128, 49152
_ATTENTION_SHARPNESS = 1.5
"""Scores are spread so that attention picks some tokens without settling on one."""


def save_tiny_model(directory: Path) -> Path:
    """A Llama model with random weights and the default model's tokenizer, as `--model-path` takes it.

    The weights are large enough for a different K or V anywhere to change the output: a trained model that
    repeats itself would forgive much."""
    tokenizer = prepare_model(MODEL, cache_dir=default_cache_dir(), report=lambda _: None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, directory / name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": Q_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)

    def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": linear(VOCABULARY, HIDDEN, 4.0),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": linear(Q_HEADS * HEAD_DIM, HIDDEN, _ATTENTION_SHARPNESS),
            f"{prefix}.self_attn.k_proj.weight": linear(KV_HEADS * HEAD_DIM, HIDDEN, _ATTENTION_SHARPNESS),
            f"{prefix}.self_attn.v_proj.weight": linear(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": linear(HIDDEN, Q_HEADS * HEAD_DIM, 2.0),
            f"{prefix}.mlp.gate_proj.weight": linear(FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": linear(FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": linear(HIDDEN, FEED_FORWARD),
        }
    return weights
