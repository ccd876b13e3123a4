"""GGUF files of other architectures and types, written by the `gguf` package itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from diptych.engine.models.config import ModelConfig
from diptych.engine.models.errors import UnsupportedModelError
from diptych.engine.weights.gguf_config import config_from_gguf
from diptych.engine.weights.gguf_convert import _write_weights

FIELDS = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 131072,
    "llama.rope.freq_base": 500000.0,
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.eot_token_id": 4,
}
SHAPES = {"token_embd.weight": (100, 64)}


def test_each_type_keeps_its_values_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((4, 64), dtype=np.float32)
    writer = GGUFWriter(tmp_path / "x.gguf", "qwen2")
    kinds = {
        "blk.0.ffn_up.weight": GGMLQuantizationType.F32,
        "blk.0.ffn_gate.weight": GGMLQuantizationType.F16,
        "blk.0.ffn_down.weight": GGMLQuantizationType.BF16,
        "blk.0.attn_q.weight": GGMLQuantizationType.Q8_0,
        "blk.0.attn_k.weight": GGMLQuantizationType.Q4_0,
    }
    expected = {}
    for name, kind in kinds.items():
        data = quantize(values, kind)
        expected[name] = torch.from_numpy(np.array(dequantize(data, kind), dtype=np.float32))
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GGUFReader(tmp_path / "x.gguf")
    out = tmp_path / "model.safetensors"
    _write_weights({t.name: t for t in reader.tensors}, {"model_type": "qwen2"}, out, lambda line: None)
    got = load_file(out)
    layer = "model.layers.0."
    assert got[layer + "mlp.gate_proj.weight"].dtype == torch.float16
    assert got[layer + "mlp.down_proj.weight"].dtype == torch.bfloat16
    for gguf_name, name in {
        "blk.0.ffn_up.weight": "mlp.up_proj.weight",
        "blk.0.ffn_gate.weight": "mlp.gate_proj.weight",
        "blk.0.ffn_down.weight": "mlp.down_proj.weight",
        "blk.0.attn_q.weight": "self_attn.q_proj.weight",
        "blk.0.attn_k.weight": "self_attn.k_proj.weight",
    }.items():
        assert torch.equal(got[layer + name].float(), expected[gguf_name]), name


def test_rope_divisors_of_llama3_become_its_parameters() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    reference = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, "cpu")
    plain = 1.0 / (500000.0 ** (torch.arange(0, 16, 2) / 16))
    config, generation = config_from_gguf(FIELDS, SHAPES, (plain / scaled).tolist())
    assert config["rope_scaling"] == {k: v for k, v in scaling.items() if k != "rope_theta"}
    assert generation["eos_token_id"] == [3, 4]

    with pytest.raises(UnsupportedModelError, match="llama3"):
        config_from_gguf(FIELDS, SHAPES, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])


def test_unknown_architectures_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gemma'.*llama, qwen2, qwen3"):
        config_from_gguf(FIELDS | {"general.architecture": "gemma"}, SHAPES, None)
    with pytest.raises(UnsupportedModelError, match="experts"):
        config_from_gguf(FIELDS | {"llama.expert_count": 8}, SHAPES, None)


def test_the_configuration_is_one_that_loads(tmp_path: Path) -> None:
    import json

    config, generation = config_from_gguf(FIELDS, SHAPES, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    read = ModelConfig.from_dir(tmp_path)
    assert (read.num_kv_heads, read.head_dim, read.tie_embeddings) == (2, 16, True)
    assert read.rope.theta == 500000.0
    assert read.eos_token_ids == (3, 4)
