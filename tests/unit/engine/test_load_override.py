"""A setting that holds for one load alone: it reaches the loader, and is gone however the load ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from unit.engine.tiny_llama import LLAMA

from diptych.common_config import Role, get_model, override_config, readback
from diptych.engine.models.errors import ModelError
from diptych.launch.assemble import build_runner


def load(folder: Path) -> str:
    """The load format that a runner was built with, asked for around its construction."""
    with get_model().override(load_format="dummy"):
        return build_runner(folder, lambda line: None).facts.load_format


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_format_for_one_load_ends_with_it(tmp_path: Path, fails: bool) -> None:
    unknown = {"model_type": "unknown", "architectures": ["UnknownForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | unknown if fails else LLAMA))
    fields = {"device": "cpu", "max_total_tokens": 64, "cpu_threads": torch.get_num_threads()}
    with override_config(role=Role.COLOCATED_SCHEDULER, **fields):
        before = readback()
        if fails:
            with pytest.raises(ModelError):
                load(tmp_path)
        else:
            assert load(tmp_path) == "dummy"
        assert get_model().load_format == "auto"
        assert readback() == before
        # Without it the loader looks for weights, and there are none.
        with pytest.raises(ModelError):
            build_runner(tmp_path, lambda line: None)
