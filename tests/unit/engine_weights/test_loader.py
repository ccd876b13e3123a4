from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from diptych.engine.models.errors import InvalidModelError, UnsupportedModelError
from diptych.engine.weights.identity import model_identity
from diptych.engine.weights.loader import load_model
from diptych.kernels.interface import AttentionStep
from diptych.kernels.registry import make_attention_backend


@pytest.fixture
def saved(tmp_path: Path) -> tuple[LlamaForCausalLM, Path]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=60,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


def logits(directory: Path, tokens: list[int], **how: object) -> torch.Tensor:
    model = load_model(directory, **({"dtype": torch.float32, "device": "cpu"} | how))
    config = model.config
    slab = torch.zeros(8, config.num_layers, 2, config.num_kv_heads, 8, config.head_dim, dtype=model.dtype)
    backend = make_attention_backend("torch_native", slab, num_q_heads=config.num_q_heads, scale=config.scale)
    positions = torch.arange(len(tokens))
    step = AttentionStep(
        is_decode=False,
        query_lens=[len(tokens)],
        seq_lens=[len(tokens)],
        page_table=torch.arange(8).view(1, -1),
        token_pages=positions // 8,
        token_offsets=positions % 8,
        positions=positions,
    )
    return model.logits(model.forward(torch.tensor(tokens), step, backend))


def test_sharded_weights_load_like_single_ones(saved, tmp_path: Path) -> None:
    model, single = saved
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    tokens = [3, 1, 4, 1, 5]
    assert torch.equal(logits(tmp_path / "sharded", tokens), logits(single, tokens))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits(single, tokens), expected, atol=1e-4, rtol=0)


def test_missing_and_unexpected_tensors_are_named(saved) -> None:
    _, directory = saved
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.bogus.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file)
    with pytest.raises(
        InvalidModelError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight; unexpected .*bogus"
    ):
        load_model(directory, dtype=torch.float32, device="cpu")


def test_a_tensor_of_another_shape_is_named(saved) -> None:
    _, directory = saved
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, file)
    with pytest.raises(InvalidModelError, match=r"model\.norm\.weight is \[31\], not \[32\]"):
        load_model(directory, dtype=torch.float32, device="cpu")


def test_a_missing_shard_is_named(saved, tmp_path: Path) -> None:
    model, _ = saved
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    victim = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(InvalidModelError, match=victim.name):
        load_model(tmp_path / "sharded", dtype=torch.float32, device="cpu")


def test_a_truncated_file_is_an_error_of_the_model(saved) -> None:
    _, directory = saved
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(InvalidModelError, match=r"model\.safetensors can't be read"):
        load_model(directory, dtype=torch.float32, device="cpu")


def test_dummy_weights_need_no_files_and_follow_the_seed(saved, tmp_path: Path) -> None:
    _, directory = saved
    (tmp_path / "bare").mkdir()
    shutil.copy(directory / "config.json", tmp_path / "bare")
    seen: list[tuple[int, int]] = []
    first = logits(
        tmp_path / "bare", [1, 2], load_format="dummy", seed=1, progress=lambda *at: seen.append(at)
    )
    assert torch.equal(first, logits(tmp_path / "bare", [1, 2], load_format="dummy", seed=1))
    assert not torch.equal(first, logits(tmp_path / "bare", [1, 2], load_format="dummy", seed=2))
    assert seen == [(1, 2), (2, 2)]


def test_unknown_choices_list_the_known(saved) -> None:
    _, directory = saved
    with pytest.raises(UnsupportedModelError, match=r"'npz'.*safetensors"):
        load_model(directory, dtype=torch.float32, device="cpu", load_format="npz")
    with pytest.raises(UnsupportedModelError, match=r"'blas'.*onednn"):
        load_model(directory, dtype=torch.float32, device="cpu", linear_backend="blas")


def test_identity_is_of_the_contents_not_the_place(saved, tmp_path: Path) -> None:
    _, directory = saved
    elsewhere = tmp_path / "copy"
    shutil.copytree(directory, elsewhere)
    config = json.loads((elsewhere / "config.json").read_text())
    (elsewhere / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    assert model_identity(elsewhere) == model_identity(directory)

    tensors = load_file(elsewhere / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, elsewhere / "model.safetensors", metadata={"format": "pt"})
    assert model_identity(elsewhere) != model_identity(directory)
    shutil.copy(directory / "model.safetensors", elsewhere)
    (elsewhere / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert model_identity(elsewhere) != model_identity(directory)
