"""`python -m diptych.bench.serving`: load on a running server, as any OpenAI client would make it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from diptych.bench.baseline import BaselineJob, BaselineResult, run_baseline_process
from diptych.bench.client import CompletionsClient, Target, run_closed_loop, run_poisson
from diptych.bench.stats import Goodput, Summary, parse_goodput, summarize
from diptych.bench.table import rate, ratio, summary_tables, table
from diptych.bench.workload import make_prompts

WARMUP_SEED_OFFSET = 1_000_003
"""Warm-up prompts differ from measured ones, or the prefix cache would already know those."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One load. Exactly one of `concurrency` (closed loop) and `rate` (Poisson, per second) is set."""

    num_requests: int
    input_len: int
    concurrency: int | None = None
    rate: float | None = None
    warmup: int = 1
    seed: int = 0
    vocab_size: int = 32000


class Report(msgspec.Struct, kw_only=True):
    """What `--json` holds."""

    target: Target
    load: Load
    summary: Summary
    baseline: BaselineResult | None = None


async def run_load(target: Target, load: Load, goodput: Goodput | None = None) -> Summary:
    """Send the load and sum it up. Failed requests are counted, not raised."""
    prompts = make_prompts(load.num_requests, load.input_len, load.vocab_size, load.seed)
    warmup = make_prompts(load.warmup, load.input_len, load.vocab_size, load.seed + WARMUP_SEED_OFFSET)
    async with CompletionsClient(target) as client:
        await run_closed_loop(client, warmup, load.concurrency or 1)
        started = time.monotonic()
        if load.rate is not None:
            records = await run_poisson(client, prompts, load.rate, load.seed)
        else:
            records = await run_closed_loop(client, prompts, load.concurrency or 1)
        return summarize(records, time.monotonic() - started, goodput)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m diptych.bench.serving",
        description="Measure a running server through /v1/completions: streaming, token-id prompts, greedy, "
        "fixed output length.",
    )
    p.add_argument("--url", required=True, help="the server, e.g. http://127.0.0.1:8000")
    p.add_argument("--model", required=True, help="model name in the requests")
    p.add_argument("--api-key")
    shape = p.add_mutually_exclusive_group()
    shape.add_argument("--concurrency", type=int, help="closed loop with this many users (default: 1)")
    shape.add_argument("--rate", type=float, help="Poisson arrivals per second")
    p.add_argument("--num-requests", type=int, default=32)
    p.add_argument("--input-len", type=int, default=512, help="tokens per prompt")
    p.add_argument("--output-len", type=int, default=64, help="tokens per answer")
    p.add_argument("--warmup", type=int, default=1, help="requests before the clock starts")
    p.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    p.add_argument("--vocab-size", type=int, default=32000, help="prompt ids are below this")
    p.add_argument(
        "--goodput", nargs="+", metavar="TARGET", help="ttft:MS tpot:MS; count requests that meet them"
    )
    p.add_argument("--baseline", choices=("transformers",), help="also run this on the same prompts, after")
    p.add_argument("--model-dir", help="the baseline's model: a folder, hub id or GGUF file")
    p.add_argument("--dtype", default="bfloat16", help="of the baseline")
    p.add_argument("--device", default="cpu", help="of the baseline")
    p.add_argument("--json", type=Path, help="write the report here")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a request failed."""
    p = parser()
    args = p.parse_args(argv)
    try:
        goodput = parse_goodput(args.goodput) if args.goodput else None
    except ValueError as error:
        p.error(f"--goodput: {error}")
    if args.baseline and not args.model_dir:
        p.error("--baseline needs --model-dir")
    for flag in ("num_requests", "input_len", "output_len"):
        if vars(args)[flag] < 1:
            p.error(f"--{flag.replace('_', '-')} must be at least 1")
    if (args.concurrency is not None and args.concurrency < 1) or (args.rate is not None and args.rate <= 0):
        p.error("--concurrency and --rate must be above 0")
    target = Target(url=args.url, model=args.model, output_len=args.output_len, api_key=args.api_key)
    load = Load(
        num_requests=args.num_requests,
        input_len=args.input_len,
        concurrency=args.concurrency,
        rate=args.rate,
        warmup=args.warmup,
        seed=args.seed,
        vocab_size=args.vocab_size,
    )
    summary = asyncio.run(run_load(target, load, goodput))
    print(summary_tables(summary))
    for reason in summary.errors:
        print(f"failed: {reason}", file=sys.stderr)
    baseline = None
    if args.baseline:
        # After the server's run, in a process of its own: neither disturbs the other.
        baseline = run_baseline_process(
            BaselineJob(
                model_dir=args.model_dir,
                dtype=args.dtype,
                device=args.device,
                input_len=args.input_len,
                decode_input_len=args.input_len,
                output_len=args.output_len,
                seed=args.seed,
                vocab_size=args.vocab_size,
            )
        )
        print()
        print(baseline_table(summary, args.input_len, baseline))
    if args.json:
        # The key is no part of a result.
        shown = msgspec.structs.replace(target, api_key=None)
        report = Report(target=shown, load=load, summary=summary, baseline=baseline)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return 1 if summary.failed else 0


def baseline_table(summary: Summary, input_len: int, baseline: BaselineResult) -> str:
    """Server beside baseline. Prefill is input tokens over median TTFT: with more than one request at a
    time it includes queueing."""
    prefill = None if summary.ttft is None else input_len / summary.ttft.p50
    decode = None if summary.tpot is None else 1 / summary.tpot.p50
    rows = []
    for name, server, reference in (
        ("prefill tok/s, one request", prefill, baseline.prefill_rate),
        ("decode tok/s, one request", decode, baseline.decode_rate),
    ):
        both = None if server is None or reference is None else server / reference
        rows.append([name, rate(server), rate(reference), ratio(both)])
    return table(["", "server", "transformers", "ratio"], rows)


if __name__ == "__main__":
    sys.exit(main())
