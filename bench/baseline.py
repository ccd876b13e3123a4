"""`python -m diptych.bench.baseline`: plain `transformers` in eager mode, one request at a time."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from diptych.bench.workload import make_prompts


class BaselineJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. Prompts are those that `bench.serving` makes of the same seed and length."""

    model_dir: str
    """A folder, hub id or GGUF file."""
    dtype: str = "bfloat16"
    device: str = "cpu"
    input_len: int
    """Tokens of the prompts whose prefill is timed."""
    decode_input_len: int
    """Tokens of the prompts after which decode is timed."""
    output_len: int
    """Tokens of each answer; decode is timed over all but the first."""
    seed: int = 0
    vocab_size: int = 32000
    repeats: int = 3


class BaselineResult(msgspec.Struct, kw_only=True):
    """Rates in tokens per second at batch size 1: medians over `job.repeats` prompts."""

    job: BaselineJob
    prefill_rate: float
    decode_rate: float | None
    """None when fewer than two tokens were asked for."""


def measure(job: BaselineJob) -> BaselineResult:
    """Load the model and time greedy generation, one warm-up prompt of each kind aside."""
    # Imported here: a process that only starts this one shouldn't pay for them.
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    path = Path(job.model_dir)
    source: dict[str, Any] = {"pretrained_model_name_or_path": job.model_dir}
    if path.suffix == ".gguf":
        # Dense weights: left packed, each matmul in a half precision unpacks them first, many times slower.
        source = {
            "pretrained_model_name_or_path": str(path.parent),
            "gguf_file": path.name,
            "quantization_config": GgufConfig(dequantize=True),
        }
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=job.dtype).to(job.device).eval()
    prompts = make_prompts(job.repeats + 1, job.input_len, job.vocab_size, job.seed)
    short = make_prompts(job.repeats + 1, job.decode_input_len, job.vocab_size, job.seed)
    with torch.inference_mode():
        prefill_seconds = [_generate(model, prompt, 1)[0] for prompt in prompts][1:]
        decode_seconds: list[float] = []
        if job.output_len > 1:
            decode_seconds = [_generate(model, prompt, job.output_len)[1] for prompt in short][1:]
    return BaselineResult(
        job=job,
        prefill_rate=job.input_len / statistics.median(prefill_seconds),
        decode_rate=(job.output_len - 1) / statistics.median(decode_seconds) if decode_seconds else None,
    )


class _TokenClock:
    """A `generate` streamer (duck-typed there: `put` and `end`) that notes when each token is on the CPU."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: object) -> None:
        self.times.append(time.monotonic())

    def end(self) -> None:
        """Part of the streamer protocol."""


def _generate(model: Any, prompt: list[int], output_len: int) -> tuple[float, float]:
    """Seconds to the first token, and from the first to the last."""
    import torch

    clock = _TokenClock()
    ids = torch.tensor([prompt], device=model.device)
    started = time.monotonic()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=output_len,
        max_new_tokens=output_len,
        pad_token_id=0,
        streamer=clock,
    )
    _, *tokens = clock.times  # the first call hands over the prompt
    assert len(tokens) == output_len, f"{len(tokens)} tokens came where {output_len} were asked for"
    return tokens[0] - started, tokens[-1] - tokens[0]


def run_baseline_process(job: BaselineJob) -> BaselineResult:
    """`measure` in a process of its own, so that its memory and threads are gone afterwards. Raises
    CalledProcessError when it fails; its messages have gone to stderr."""
    command = [sys.executable, "-m", "diptych.bench.baseline"]
    for name, value in msgspec.to_builtins(job).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return msgspec.json.decode(output.splitlines()[-1], type=BaselineResult)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one line of JSON (a `BaselineResult`)."""
    p = argparse.ArgumentParser(prog="python -m diptych.bench.baseline", description=__doc__)
    p.add_argument("--model-dir", required=True, help="a folder, hub id or GGUF file")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--device", default="cpu")
    p.add_argument("--input-len", type=int, default=512)
    p.add_argument("--decode-input-len", type=int, default=32)
    p.add_argument("--output-len", type=int, default=64)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--vocab-size", type=int, default=32000)
    p.add_argument("--repeats", type=int, default=3)
    print(msgspec.json.encode(measure(BaselineJob(**vars(p.parse_args(argv))))).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
