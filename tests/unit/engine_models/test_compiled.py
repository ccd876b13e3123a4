"""Layers through `torch.compile`: the same numbers, and no compilation once the model stands."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from transformers import LlamaConfig, Qwen3Config

from diptych.engine.models.errors import UnsupportedModelError
from diptych.engine.weights.loader import load_model

TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 512,
}


def tokens_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# Both linear backends, both attention backends, with and without norms of q and k, biases, a compilation of
# its own for a lone row: two models have it all.
@pytest.mark.parametrize(
    ("config", "linear_backend", "attention", "batch_invariant"),
    [
        (LlamaConfig(**TINY, attention_bias=True, mlp_bias=True), "onednn", "cpu", True),
        (Qwen3Config(**TINY), "plain", "torch_native", False),
    ],
    ids=["llama", "qwen3"],
)
def test_compiled_layers_give_what_eager_ones_give_at_any_length(
    config, linear_backend: str, attention: str, batch_invariant: bool, save_reference, paged_runner
) -> None:
    _, directory = save_reference(config)
    how = {"dtype": torch.float32, "device": "cpu", "linear_backend": linear_backend}
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = load_model(directory, **how, batch_invariant=batch_invariant, torch_compile=True)
    compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # Two halves, for all layers together; again for a single row where steps may have one.
    assert compilations == (2 if batch_invariant else 4)
    ours = paged_runner(compiled, page_size=16, backend=attention)
    theirs = paged_runner(load_model(directory, **how), page_size=16, backend=attention)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (1, 2, 3, 17, 64, 150):
            names = {f"p{length}": tokens_of(length, seed=length)}
            compare(ours.step(names), theirs.step(names))
        pair = {"p17": tokens_of(5, seed=1), "new": tokens_of(30, seed=2)}
        compare(ours.step(pair), theirs.step(pair))
        for names in (["p2"], ["p1", "p3", "p17", "p64", "p150"], ["p150", "p3"]):
            newest = {name: [7] for name in names}
            compare(ours.step(newest, decode=True), theirs.step(newest, decode=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compilations

    if batch_invariant:
        alone = paged_runner(compiled, page_size=16, backend=attention)
        company = paged_runner(compiled, page_size=16, backend=attention)
        prompt, others = tokens_of(20, seed=5), {"b": tokens_of(50, seed=6), "c": tokens_of(3, seed=7)}
        assert torch.equal(alone.step({"a": prompt})["a"], company.step({"a": prompt, **others})["a"])
        expected = alone.step({"a": [9]}, decode=True)["a"]
        step = company.step({"b": [4], "a": [9], "c": [8]}, decode=True)
        assert torch.equal(step["a"], expected)


def compare(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, logits in theirs.items():
        torch.testing.assert_close(ours[name], logits, atol=1e-4, rtol=0)


def test_where_nothing_compiles_one_sentence_says_so(save_reference) -> None:
    _, directory = save_reference(LlamaConfig(**TINY))
    torch.compiler.reset()
    # Not pytest's `monkeypatch`, which can't put a setting of Inductor's back.
    nothing_compiles = {"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}
    with (
        torch._inductor.config.patch(nothing_compiles),
        pytest.raises(UnsupportedModelError, match=r"--enable-torch-compile: .*"),
    ):
        load_model(directory, dtype=torch.float32, device="cpu", torch_compile=True)
