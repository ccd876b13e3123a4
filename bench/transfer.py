"""`python -m diptych.bench.transfer`: how fast KV pages get from prefill to decode, and what of it a client
waits for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from diptych.bench import transfer_exposed, transfer_path
from diptych.bench.compare import DEFAULT_MODEL
from diptych.bench.processes import ProcessFailed
from diptych.bench.servers import ServerFailed
from diptych.bench.transfer_exposed import Exposure, RequestFailed, exposure_table
from diptych.bench.transfer_path import BadTransfer, Figures, path_table

BACKENDS = ("nixl", "mooncake")
CHUNK = 512
"""The default of `--chunked-prefill-size`."""


class Report(msgspec.Struct, kw_only=True):
    """What `--json` holds."""

    page_bytes: int = transfer_path.PAGE_BYTES
    path: list[Figures] = []
    exposed: list[Exposure] = []


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m diptych.bench.transfer", description=__doc__)
    p.add_argument("--backend", choices=BACKENDS, action="append", help="may be repeated (default: both)")
    p.add_argument("--part", choices=("path", "exposed"), action="append", help="(default: both)")
    p.add_argument("--pages", type=int, nargs="+", default=transfer_path.SIZES, help="per transfer")
    p.add_argument("--rounds", type=int, default=5, help="of every measurement of the path, in turn")
    p.add_argument("--model-path", default=DEFAULT_MODEL)
    p.add_argument("--exposed-backend", choices=BACKENDS, default="nixl", help="under the HTTP workers")
    p.add_argument("--prompt-lens", type=int, nargs="+", default=transfer_exposed.LENGTHS)
    p.add_argument("--repeats", type=int, default=3, help="prompts of each length")
    p.add_argument("--log-dir", type=Path, default=Path("build/bench"), help="for the servers' output")
    p.add_argument("--json", type=Path, help="write all figures here")
    p.add_argument("flags", nargs="*", help="further flags of the servers, after --")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a process or a request failed, or when pages arrived wrong or in more descriptors
    than there are contiguous runs."""
    p = parser()
    args = p.parse_args(argv)
    if min(*args.pages, args.rounds, args.repeats, *args.prompt_lens) < 1:
        p.error("every number must be at least 1")
    args.log_dir.mkdir(parents=True, exist_ok=True)
    parts = args.part or ["path", "exposed"]
    report = Report()
    try:
        if "path" in parts:
            for backend in args.backend or BACKENDS:
                print(f"measuring the path of {backend}…", file=sys.stderr)
                report.path += transfer_path.measure(backend, args.pages, args.rounds)
            print(path_table(report.path), end="\n\n")
        if "exposed" in parts:
            for chunk in (CHUNK, transfer_exposed.UNCHUNKED):
                print(f"measuring TTFT in chunks of {chunk}…", file=sys.stderr)
                report.exposed += transfer_exposed.measure(
                    args.exposed_backend,
                    args.model_path,
                    args.flags,
                    args.log_dir,
                    chunk=chunk,
                    lengths=args.prompt_lens,
                    repeats=args.repeats,
                )
            print(exposure_table(report.exposed))
    except (ProcessFailed, ServerFailed, RequestFailed, BadTransfer) as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
