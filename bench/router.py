"""`python -m diptych.bench.router`: what a router adds to a request, ours beside `sglang-router`.

Two echo workers, each a process of its own, stand for a prefill and a decode worker. The same streamed chats
go straight to the decode worker and through each router in turn; the difference is what the router adds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import msgspec
import psutil

from diptych.bench.servers import free_port, running_server, script
from diptych.bench.stats import percentile
from diptych.bench.table import table

PEER = Path(__file__).parents[1] / "build" / "interop" / "venv" / "bin" / "python"
TOKENS = 8
TOKENS_PER_SECOND = 1280
"""Of all streams together, however many: few enough that two cores have time to spare, so that what is
measured is no queue for a processor."""
READY_SECONDS = 30.0
DIRECT = "direct"


class Sample(msgspec.Struct):
    """One request, in seconds."""

    first: float
    """To the first byte of the answer's body."""
    whole: float


class Result(msgspec.Struct, kw_only=True):
    """One way to the workers under one number of streams; seconds."""

    way: str
    streams: int
    requests: int
    failed: int
    first_p50: float
    first_p99: float
    whole_p50: float
    whole_p99: float
    cpu_per_request: float
    """Of the router's processes; 0 without one."""

    def times(self) -> tuple[float, ...]:
        return self.first_p50, self.first_p99, self.whole_p50, self.whole_p99


class Way:
    """Where requests are sent, and what they took there."""

    def __init__(self, name: str, url: str, router: psutil.Process | None) -> None:
        self.name = name
        self.url = url
        self.router = router
        self.samples: list[Sample] = []
        self.failed = 0
        self.cpu_seconds = 0.0

    async def send(self, streams: int, each: int) -> None:
        """`each` requests on each of so many streams, one after the other."""
        before = self._cpu()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            # Spread over one request's time, so that streams don't march in step.
            wait = TOKENS / TOKENS_PER_SECOND
            await asyncio.gather(*(self._stream(client, i * wait, each) for i in range(streams)))
        self.cpu_seconds += self._cpu() - before

    async def _stream(self, client: aiohttp.ClientSession, wait: float, each: int) -> None:
        await asyncio.sleep(wait)
        body = {
            "model": "echo",
            "messages": [{"role": "user", "content": "How long does it take to go through?"}],
            "max_tokens": TOKENS,
            "stream": True,
        }
        for _ in range(each):
            started = time.perf_counter()
            async with client.post(f"{self.url}/v1/chat/completions", json=body) as response:
                answer = await response.content.readany()
                first = time.perf_counter() - started
                answer += await response.content.read()
            if response.status == 200 and answer.endswith(b"data: [DONE]\n\n"):
                self.samples.append(Sample(first, time.perf_counter() - started))
            else:
                self.failed += 1

    def _cpu(self) -> float:
        if self.router is None:
            return 0.0
        processes = [self.router, *self.router.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def forget(self) -> None:
        """What the way took so far, for warming up."""
        self.samples.clear()
        self.cpu_seconds = 0.0

    def result(self, streams: int) -> Result:
        first = [sample.first for sample in self.samples]
        whole = [sample.whole for sample in self.samples]
        return Result(
            way=self.name,
            streams=streams,
            requests=len(self.samples),
            failed=self.failed,
            first_p50=percentile(first, 50),
            first_p99=percentile(first, 99),
            whole_p50=percentile(whole, 50),
            whole_p99=percentile(whole, 99),
            cpu_per_request=self.cpu_seconds / len(self.samples),
        )


@contextlib.contextmanager
def router_process(command: Sequence[str], ready: str, log: Path) -> Iterator[psutil.Process]:
    """Run a router; yields once `ready` answers 200. Raises RuntimeError if it doesn't."""
    # Nothing of it should look for a model on the internet.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:1"}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=environment
        )
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not _answers(ready):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{command[0]} isn't ready:\n{log.read_text(errors='replace')[-2000:]}"
                    )
                time.sleep(0.1)
            yield psutil.Process(process.pid)
        finally:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except urllib.error.URLError:
        return False


def measure(streams: int, each: int, rounds: int, peer: Path | None, folder: Path) -> list[Result]:
    """All ways under one number of streams, in turn, so that what else the machine does hits each."""
    gap = str(streams / TOKENS_PER_SECOND)
    with contextlib.ExitStack() as stack:
        urls = {}
        for role in ("prefill", "decode"):
            port = str(free_port())
            echo = [sys.executable, "-m", "diptych.bench.echo_worker", "--role", role, "--port", port]
            stack.enter_context(running_server([*echo, "--token-gap", gap], folder / f"{role}.log"))
            urls[role] = f"http://127.0.0.1:{port}"
        pair = ["--prefill", urls["prefill"], urls["prefill"].rpartition(":")[2], "--decode", urls["decode"]]
        commands = {"launch-router": ([script("launch-router")], "health")}
        if peer is not None:
            options = ["--pd-disaggregation", "--prometheus-port", str(free_port()), "--log-level", "error"]
            module = [str(peer), "-m", "sglang_router.launch_router"]
            commands["sglang-router"] = ([*module, *options], "readiness")
        ways = [Way(DIRECT, urls["decode"], None)]
        for name, (command, path) in commands.items():
            url = f"http://127.0.0.1:{free_port()}"
            address = ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
            running = router_process([*command, *address, *pair], f"{url}/{path}", folder / f"{name}.log")
            ways.append(Way(name, url, stack.enter_context(running)))
        for way in ways:
            asyncio.run(way.send(min(streams, 8), 2))
            way.forget()
        for _ in range(rounds):
            for way in ways:
                asyncio.run(way.send(streams, each))
        return [way.result(streams) for way in ways]


def results_table(results: Sequence[Result]) -> str:
    """What each router adds to going straight to the decode worker, in milliseconds."""
    rows = []
    straight = {result.streams: result for result in results if result.way == DIRECT}
    for result in results:
        base = straight[result.streams]
        pairs = list(zip(result.times(), base.times(), strict=True))
        shown = [f"{1e3 * mine:.2f}" if result is base else f"+{1e3 * (mine - of):.2f}" for mine, of in pairs]
        cpu = "-" if result is base else f"{1e3 * result.cpu_per_request:.2f}"
        rows.append([result.way, str(result.streams), *shown, cpu, f"{result.requests} ({result.failed})"])
    head = ["way", "streams", "first byte p50", "p99", "whole p50", "p99", "CPU/request", "requests (failed)"]
    return table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a request failed."""
    p = argparse.ArgumentParser(prog="python -m diptych.bench.router", description=__doc__)
    p.add_argument("--streams", type=int, nargs="+", default=(1, 32, 256))
    p.add_argument("--requests", type=int, default=512, help="on each way, at least one a stream and round")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--peer", type=Path, default=PEER, help="interpreter of an environment with sglang-router")
    p.add_argument("--no-peer", action="store_true", help="ours alone")
    p.add_argument("--json", type=Path, help="write the results here")
    args = p.parse_args(argv)
    if not args.no_peer and not args.peer.exists():
        p.error(f"{args.peer} isn't there: `make interop` makes it, or use --no-peer")
    results = []
    with TemporaryDirectory() as folder:
        for streams in args.streams:
            each = max(1, args.requests // (streams * args.rounds))
            peer = None if args.no_peer else args.peer
            results += measure(streams, each, args.rounds, peer, Path(folder))
            print(f"{streams} streams: done", file=sys.stderr)
    print(results_table(results))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
