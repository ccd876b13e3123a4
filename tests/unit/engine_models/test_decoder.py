"""The oracle is `transformers`, in float32, on tiny random models of each family."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from diptych.engine.weights.loader import load_model

TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "llama tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "llama biases": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama head_dim": LlamaConfig(**TINY, head_dim=16),
    "llama linear rope": LlamaConfig(
        **TINY, rope_parameters={"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}
    ),
    "llama dynamic rope": LlamaConfig(
        **TINY, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama3 rope": LlamaConfig(**TINY, rope_parameters=LLAMA3),
    "llama yarn rope": LlamaConfig(**TINY, rope_parameters=YARN),
    "mistral": MistralConfig(**TINY, sliding_window=None),
    "qwen2": Qwen2Config(**TINY, tie_word_embeddings=False),
    "qwen2 tied": Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**TINY, head_dim=16),
    "qwen3 tied": Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=True),
}


def tokens_of(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("linear_backend", ["plain", "onednn"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_equal_transformers(
    config: PreTrainedConfig, linear_backend: str, save_reference, paged_runner
) -> None:
    reference, directory = save_reference(config)
    model = load_model(directory, dtype=torch.float32, device="cpu", linear_backend=linear_backend)
    prompt, other = tokens_of(150), tokens_of(37, seed=2)
    expected, expected_other = reference_logits(reference, prompt), reference_logits(reference, other)
    assert expected.abs().max() > 0.3, "logits too flat to tell models apart"

    whole = paged_runner(model, page_size=16)
    close(whole.step({"a": prompt})["a"], expected)

    # Chunked, with another sequence in the same steps, then both decoding.
    runner = paged_runner(model, page_size=16)
    close(runner.step({"a": prompt[:33]})["a"], expected[:33])
    second = runner.step({"b": other[:20], "a": prompt[33:96]})
    close(second["b"], expected_other[:20])
    close(second["a"], expected[33:96])
    close(runner.step({"a": prompt[96:140]})["a"], expected[96:140])
    for i in range(10):
        step = runner.step({"a": [prompt[140 + i]], "b": [other[20 + i]]}, decode=True)
        close(step["a"], expected[140 + i : 141 + i])
        close(step["b"], expected_other[20 + i : 21 + i])


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_size_does_not_change_logits(page_size: int, save_reference, paged_runner) -> None:
    reference, directory = save_reference(CONFIGS["llama"])
    model = load_model(directory, dtype=torch.float32, device="cpu")
    prompt = tokens_of(129)
    expected = reference_logits(reference, prompt)
    runner = paged_runner(model, page_size=page_size)
    close(runner.step({"a": prompt[:64]})["a"], expected[:64])
    close(runner.step({"a": prompt[64:128]})["a"], expected[64:128])
    close(runner.step({"a": prompt[128:]}, decode=True)["a"], expected[128:])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_follows_float32(family: str, save_reference, paged_runner) -> None:
    reference, directory = save_reference(CONFIGS[family])
    model = load_model(directory, dtype=torch.bfloat16, device="cpu")
    prompt = tokens_of(60)
    expected = reference_logits(reference, prompt)
    logits = paged_runner(model, page_size=16).step({"a": prompt})["a"]
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_no_rows_give_no_logits(save_reference) -> None:
    _, directory = save_reference(CONFIGS["llama"])
    model = load_model(directory, dtype=torch.float32, device="cpu")
    assert model.logits(torch.zeros(0, 48)).shape == (0, 131)
