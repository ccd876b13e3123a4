from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diptych.engine.models.config import ModelConfig
from diptych.engine.models.errors import InvalidModelError, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.fixture
def read(tmp_path: Path):
    def read(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return ModelConfig.from_dir(tmp_path)

    return read


def test_both_spellings_of_rope_and_dtype_are_read(read) -> None:
    old = read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = read(
        torch_dtype=None,
        dtype="bfloat16",
        rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
    )
    assert old == new
    assert (old.rope.theta, old.rope.type, old.rope.factor, old.dtype) == (5e5, "linear", 2.0, "bfloat16")


def test_layout_of_a_page_follows_the_model(read) -> None:
    layout = read(head_dim=32).kv_layout(16, "bfloat16")
    assert (layout.num_layers, layout.kv_heads, layout.head_dim, layout.page_size) == (2, 2, 32, 16)
    assert layout.page_bytes == 2 * 2 * 2 * 32 * 16 * 2


def test_end_tokens_of_both_files_are_joined(read) -> None:
    assert read({"eos_token_id": [7, 2, 9]}).eos_token_ids == (2, 7, 9)
    assert read({"eos_token_id": 5}, eos_token_id=[3, 4]).eos_token_ids == (3, 4, 5)
    assert read({}, eos_token_id=None).eos_token_ids == ()


def test_sliding_window_caps_the_context_and_says_so(read, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = read(architectures=["MistralForCausalLM"], sliding_window=1024)
    assert config.max_context == 1024
    assert "1024" in caplog.text


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 4096),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8192}, 4096),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "use_sliding_window": False}, 4096),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            4096,
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            512,
        ),
    ],
)
def test_a_window_that_no_layer_uses_does_not_cap(read, changes: dict[str, Any], context: int) -> None:
    assert read(**changes).max_context == context


def test_unsupported_architecture_lists_the_supported(read) -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        read(architectures=["GPT2LMHeadModel"])


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, UnsupportedModelError, "longrope.*llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, InvalidModelError, "original_max_position"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModelError, "quantized"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "gelu"),
        ({"hidden_size": "64"}, InvalidModelError, "hidden_size"),
        ({"num_hidden_layers": None}, InvalidModelError, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, InvalidModelError, "heads"),
        ({"torch_dtype": "float64"}, UnsupportedModelError, "float64.*bfloat16"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    read, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        read(**changes)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match=r"has no config\.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidModelError, match="not valid JSON"):
        ModelConfig.from_dir(tmp_path)


def test_reading_a_configuration_does_not_import_torch(read, tmp_path: Path) -> None:
    read()
    code = (
        "import sys\nfrom diptych.engine.models.config import ModelConfig\n"
        f"ModelConfig.from_dir({str(tmp_path)!r}).kv_layout(16, 'float16')\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
