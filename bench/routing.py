"""`python -m diptych.bench.routing`: what a router's policies make of prompts that share beginnings.

Echo workers with simulated prefix caches stand for prefill workers, `launch-router` runs before them once for
each policy, and a decode worker answers when the prompt is computed, so time to first byte is real queueing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import msgspec

from diptych.bench.echo_worker import EchoSettings, EchoWorker, Totals
from diptych.bench.prefix_workload import WORKLOADS, Session, Shape, ideal_hit_rate
from diptych.bench.servers import free_port, running_server, script
from diptych.bench.table import table

POLICIES = ("cache_aware", "power_of_two", "round_robin", "random")


class Result(msgspec.Struct, kw_only=True):
    """One policy on one workload."""

    workload: str
    policy: str
    hit_rate: float
    """Share of prompt tokens that prefill workers had cached."""
    ideal_hit_rate: float
    """With one worker that never forgets."""
    request_imbalance: float
    """Requests of the busiest prefill worker over the mean."""
    compute_imbalance: float
    """The same of prompt tokens computed."""
    ttft_p50: float
    """Seconds, in sessions side by side."""
    seconds: float
    failed: int


def imbalance(counts: Sequence[int]) -> float:
    """Largest over mean."""
    return max(counts) * len(counts) / sum(counts)


def summed_up(
    workload: str, policy: str, ideal: float, prefill: Sequence[Totals], ttfts: list[float], seconds: float
) -> Result:
    """What the prefill workers counted, as rates. `ttfts` in seconds, NaN for a request that failed."""
    good = sorted(t for t in ttfts if t == t)
    return Result(
        workload=workload,
        policy=policy,
        hit_rate=sum(t.cached_tokens for t in prefill) / sum(t.prompt_tokens for t in prefill),
        ideal_hit_rate=ideal,
        request_imbalance=imbalance([t.requests for t in prefill]),
        compute_imbalance=imbalance([t.prompt_tokens - t.cached_tokens for t in prefill]),
        ttft_p50=good[len(good) // 2] if good else float("nan"),
        seconds=seconds,
        failed=len(ttfts) - len(good),
    )


async def run_sessions(url: str, sessions: Sequence[Session], concurrency: int) -> list[float]:
    """Seconds to the first byte of each answer, NaN where there was none."""
    queue = iter(sessions)
    times: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def user() -> None:
            for session in queue:  # one iterator for all: each session is taken once
                for body in session:
                    started = time.monotonic()
                    async with client.post(
                        f"{url}/v1/chat/completions", json={**body, "stream": True}
                    ) as response:
                        await response.content.readany()
                        times.append(time.monotonic() - started if response.ok else float("nan"))
                        await response.read()

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user())
    return times


@contextlib.asynccontextmanager
async def echo_cluster(
    prefills: int, settings: EchoSettings
) -> AsyncIterator[tuple[list[EchoWorker], list[str]]]:
    """Prefill workers and one decode worker that awaits them, in this process; and the router's flags."""
    workers = [EchoWorker(dataclasses.replace(settings, role="prefill")) for _ in range(prefills)]
    decode = EchoWorker(dataclasses.replace(settings, role="decode", await_prefill=True))
    flags: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        for worker in [*workers, decode]:
            await worker.start()
            stack.push_async_callback(worker.stop)
        for worker in workers:
            flags += ["--prefill", worker.url, str(worker.port)]
        yield workers, [*flags, "--decode", decode.url]


async def measure(
    policy: str, workload: str, shape: Shape, prefills: int, settings: EchoSettings, concurrency: int
) -> Result:
    """One policy on one workload, with fresh workers and a fresh router."""
    sessions = WORKLOADS[workload](shape)
    ideal = ideal_hit_rate(sessions, settings.page_size)
    async with echo_cluster(prefills, settings) as (workers, flags):
        port = free_port()
        command = [script("launch-router"), "--port", str(port), "--policy", policy, *flags]
        with TemporaryDirectory() as folder:
            router = running_server(command, Path(folder) / "router.log", 30.0)
            # The router is ready once it has polled the workers, which answer from this very loop.
            await asyncio.to_thread(router.__enter__)
            try:
                started = time.monotonic()
                ttfts = await run_sessions(f"http://127.0.0.1:{port}", sessions, concurrency)
                seconds = time.monotonic() - started
            finally:
                await asyncio.to_thread(router.__exit__, None, None, None)
        return summed_up(workload, policy, ideal, [w.totals for w in workers], ttfts, seconds)


def results_table(results: Sequence[Result]) -> str:
    rows = [
        [
            r.workload,
            r.policy,
            f"{r.hit_rate:.3f}",
            f"{r.hit_rate / r.ideal_hit_rate:.2f}",
            f"{r.request_imbalance:.2f}",
            f"{r.compute_imbalance:.2f}",
            f"{1e3 * r.ttft_p50:.1f}",
            f"{r.seconds:.1f}",
        ]
        for r in results
    ]
    head = ["workload", "policy", "hit rate", "of ideal", "requests max/mean", "compute max/mean"]
    return table([*head, "TTFT p50 ms", "seconds"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a request failed."""
    p = argparse.ArgumentParser(prog="python -m diptych.bench.routing", description=__doc__)
    p.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), default=tuple(WORKLOADS))
    p.add_argument("--policy", nargs="+", choices=POLICIES, default=POLICIES)
    p.add_argument("--prefill-workers", type=int, default=3)
    p.add_argument("--concurrency", type=int, default=24, help="sessions side by side")
    p.add_argument("--num-requests", type=int, default=600)
    p.add_argument("--groups", type=int, default=24, help="system prompts")
    p.add_argument("--cache-pages", type=int, default=1000, help="of each prefill worker, of 16 tokens")
    p.add_argument("--prompt-token-us", type=float, default=20.0, help="compute of a token not cached")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", type=Path, help="write the results here")
    args = p.parse_args(argv)
    shape = Shape(requests=args.num_requests, groups=args.groups, seed=args.seed)
    settings = EchoSettings(
        cache_pages=args.cache_pages, seconds_per_prompt_token=args.prompt_token_us * 1e-6
    )
    results = []
    for workload in args.workload:
        for policy in args.policy:
            results.append(
                asyncio.run(
                    measure(policy, workload, shape, args.prefill_workers, settings, args.concurrency)
                )
            )
            print(f"{workload} {policy}: done", file=sys.stderr)
    print(results_table(results))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 1 if any(r.failed for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
