"""The `transformers` baseline, on a tiny random model in a process of its own."""

from __future__ import annotations

import subprocess

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from diptych.bench.baseline import BaselineJob, run_baseline_process

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_rates_of_a_tiny_model(tmp_path):
    LlamaForCausalLM(LlamaConfig(vocab_size=1100, **SIZES)).save_pretrained(tmp_path)
    job = BaselineJob(
        model_dir=str(tmp_path),
        dtype="float32",
        input_len=64,
        decode_input_len=4,
        output_len=4,
        vocab_size=1100,
        repeats=2,
    )
    result = run_baseline_process(job)
    assert result.job == job
    assert result.prefill_rate > result.decode_rate > 0


def test_a_model_that_is_not_there_is_a_failure(tmp_path):
    job = BaselineJob(model_dir=str(tmp_path / "none"), input_len=1, decode_input_len=1, output_len=1)
    with pytest.raises(subprocess.CalledProcessError):
        run_baseline_process(job)
