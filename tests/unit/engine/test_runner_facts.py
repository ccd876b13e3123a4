"""What is built for one runner belongs to that runner: not to the process, the record or the next runner."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from unit.engine.tiny_llama import LLAMA

from diptych.common_config import (
    AttentionPair,
    Role,
    get_exec,
    get_model,
    override_config,
    readback,
)
from diptych.engine.runner import ModelRunner, RunnerFacts
from diptych.kernels.registry import available_attention_backends
from diptych.launch.assemble import build_runner


def build(folder: Path) -> ModelRunner:
    return build_runner(folder, lambda line: None)


def build_second(folder: Path) -> ModelRunner:
    """With a context, a dtype and an attention of its own, asked for around its construction alone."""
    pair = AttentionPair("torch_native", "torch_native")
    with (
        get_model().override(context_length=64, dtype="bfloat16"),
        get_exec().kernel.override(attention_backends=pair),
    ):
        return build(folder)


@pytest.mark.parametrize("second_first", [False, True])
def test_two_runners_of_a_process_differ_in_whatever_order_they_are_built(
    tmp_path: Path, second_first: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    fields = {"load_format": "dummy", "device": "cpu", "max_total_tokens": 64}
    with override_config(
        role=Role.COLOCATED_SCHEDULER, cpu_threads=torch.get_num_threads(), **fields
    ) as record:
        before, asked = readback(), record.redacted()
        if second_first:
            second, first = build_second(tmp_path), build(tmp_path)
        else:
            first, second = build(tmp_path), build_second(tmp_path)
        assert (first.facts.context_length, second.facts.context_length) == (256, 64)
        assert (first.facts.dtype, second.facts.dtype) == ("float32", "bfloat16")
        assert (first.facts.kv_dtype, second.facts.kv_dtype) == ("float32", "bfloat16")
        # Stamped is what was constructed, by its own name, though nothing was asked.
        preferred = available_attention_backends("cpu")[0]
        assert first.facts.prefill_attention_backend == first.facts.decode_attention_backend == preferred
        assert second.facts.prefill_attention_backend == "torch_native"
        # Bags and record say what they said: no runner's choice became the next one's flag.
        assert (readback(), record.redacted()) == (before, asked)


def test_a_stamp_is_whole_and_frozen() -> None:
    values = ["cpu", "cpu", "float32", "float32", 256, "dummy", "plain", True, False]
    with pytest.raises(TypeError, match="torch_compile"):
        RunnerFacts(*values[:-1])  # type: ignore[call-arg, arg-type]
    facts = RunnerFacts(*values)  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.context_length = 1  # type: ignore[misc]
