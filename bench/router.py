"""`python -m diptych.bench.router`: what a router adds to a stream's latencies, and its processor time.

A pair of workers that answer at a set pace (`bench/paced_worker.py`) is asked directly, through
`launch-router` and through the released `sglang-router`; in turn, round after round, so that whatever else
the machine does hits all alike. What is *added* is a percentile through a router less the same percentile of
asking directly.
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

import msgspec
import psutil

from diptych.bench.servers import ServerFailed, free_port, running_server, script
from diptych.bench.stats import percentile
from diptych.bench.stream_load import Samples, closed_loop
from diptych.bench.table import table

PEER = Path(__file__).parents[1] / "build" / "interop" / "venv" / "bin" / "python"
PIECES = 16
"""Of each stream."""
PIECES_PER_SECOND = 1280
"""Of all streams together, however many: few enough that two cores have time to spare, so that what is
measured is no queue for a processor."""
SHORT_USERS = 8
"""Who ask for answers that aren't streamed, each as fast as it gets them."""
READY_SECONDS = 60.0
DIRECT = "direct"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    users: int
    stream: bool

    @property
    def name(self) -> str:
        if self.stream:
            return f"{self.users} stream{'s' if self.users > 1 else ''}"
        return f"short answers, {self.users} users"

    @property
    def gap(self) -> float:
        """Seconds between two pieces of a stream."""
        return self.users / PIECES_PER_SECOND


class Result(msgspec.Struct, kw_only=True):
    """One way to the workers under one load, all rounds together; seconds."""

    way: str
    load: Load
    requests: int
    failed: int
    requests_per_second: float
    first_p50: float
    """To the first byte of the answer's body."""
    first_p99: float
    piece_p50: float | None
    """Of a later piece, from the worker's sending until it is read; None for answers that aren't streamed."""
    piece_p99: float | None
    cpu_per_request: float
    """Of the router's processes; 0 without one."""

    def times(self) -> tuple[float | None, ...]:
        return self.first_p50, self.first_p99, self.piece_p50, self.piece_p99


class Way:
    """Where requests are sent, and what became of them there."""

    def __init__(self, name: str, port: int, router: psutil.Process | None = None) -> None:
        self.name = name
        self._port = port
        self._router = router
        self.forget()

    def send(self, load: Load, each: int) -> None:
        """`each` requests of each user, one after the other."""
        spread = load.gap * PIECES if load.stream else 0.0
        cpu, started = self._cpu(), time.monotonic()
        loop = closed_loop(
            self._port, load.users, each, pieces=PIECES if load.stream else None, spread=spread
        )
        self._samples.add(asyncio.run(loop))
        self._seconds += time.monotonic() - started
        self._cpu_seconds += self._cpu() - cpu

    def forget(self) -> None:
        """What came before, to warm up."""
        self._samples = Samples()
        self._seconds = 0.0
        self._cpu_seconds = 0.0

    def result(self, load: Load) -> Result:
        """Raises ServerFailed when no request was answered."""
        samples = self._samples
        good = samples.requests - samples.failed
        if samples.failed:
            print(f"{self.name}, {load.name}: {samples.failed} failed: {samples.error}", file=sys.stderr)
        if not good:
            raise ServerFailed(f"{self.name}: no request was answered: {samples.error}")
        transit = samples.transit
        return Result(
            way=self.name,
            load=load,
            requests=samples.requests,
            failed=samples.failed,
            requests_per_second=good / self._seconds,
            first_p50=percentile(samples.first_byte, 50),
            first_p99=percentile(samples.first_byte, 99),
            piece_p50=percentile(transit, 50) if transit else None,
            piece_p99=percentile(transit, 99) if transit else None,
            cpu_per_request=self._cpu_seconds / good,
        )

    def _cpu(self) -> float:
        if self._router is None:
            return 0.0
        family = [self._router, *self._router.children(recursive=True)]
        return sum(times.user + times.system for times in (member.cpu_times() for member in family))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


@contextlib.contextmanager
def router_process(command: Sequence[str], ready_url: str, log: Path) -> Iterator[psutil.Process]:
    """Run a router; yields once `ready_url` answers 200. Raises ServerFailed if it doesn't."""
    # Nothing of it should look for a model on the internet.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:1"}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=environment
        )
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not _answers(ready_url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ServerFailed(
                        f"{command[0]} isn't ready:\n{log.read_text(errors='replace')[-2000:]}"
                    )
                time.sleep(0.1)
            yield psutil.Process(process.pid)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def ways_to_workers(gap: float, peer: Path | None, folder: Path) -> Iterator[list[Way]]:
    """A pair of workers, and each router before it."""
    prefill, decode = free_port(), free_port()
    workers = [sys.executable, "-m", "diptych.bench.paced_worker", str(prefill), str(decode)]
    pair = [
        "--prefill",
        f"http://127.0.0.1:{prefill}",
        str(prefill),
        "--decode",
        f"http://127.0.0.1:{decode}",
    ]
    commands = {"launch-router": ([script("launch-router")], "health")}
    if peer is not None:
        options = ["--pd-disaggregation", "--prometheus-port", str(free_port()), "--log-level", "error"]
        commands["sglang-router"] = (
            [str(peer), "-m", "sglang_router.launch_router", *options],
            "readiness",
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            running_server([*workers, "--gap-ms", str(1e3 * gap)], folder / "workers.log", READY_SECONDS)
        )
        ways = [Way(DIRECT, decode)]
        for name, (command, path) in commands.items():
            port = free_port()
            full = [*command, "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", *pair]
            running = router_process(full, f"http://127.0.0.1:{port}/{path}", folder / f"{name}.log")
            ways.append(Way(name, port, stack.enter_context(running)))
        yield ways


def measure(load: Load, requests: int, rounds: int, peer: Path | None) -> list[Result]:
    """All ways under one load, in turn."""
    each = max(1, requests // (load.users * rounds))
    with TemporaryDirectory() as folder, ways_to_workers(load.gap, peer, Path(folder)) as ways:
        for way in ways:
            way.send(Load(users=min(load.users, SHORT_USERS), stream=load.stream), 2)
            way.forget()
        for number in range(rounds):
            turn = number % len(ways)
            for way in [*ways[turn:], *ways[:turn]]:
                way.send(load, each)
        return [way.result(load) for way in ways]


def latency_table(results: Sequence[Result]) -> str:
    """Milliseconds: asking directly, and what each router adds to that."""
    direct = {result.load: result for result in results if result.way == DIRECT}
    rows = []
    for result in results:
        base = direct[result.load]
        shown = []
        for mine, of in zip(result.times(), base.times(), strict=True):
            if mine is None or of is None:
                shown.append("-")
            else:
                shown.append(f"{1e3 * mine:.2f}" if result is base else f"{1e3 * (mine - of):+.2f}")
        rows.append([result.load.name, result.way, *shown, f"{result.requests} ({result.failed})"])
    return table(["ms", "way", "first byte p50", "p99", "piece p50", "p99", "requests (failed)"], rows)


def cpu_table(results: Sequence[Result]) -> str:
    """Processor time of each router for a request, and for a piece of a stream: what a stream costs more than
    a short answer, by its pieces."""
    routers = [result for result in results if result.way != DIRECT]
    short = {result.way: result.cpu_per_request for result in routers if not result.load.stream}
    rows = []
    for result in routers:
        piece, rate = "-", "-"
        if result.load.stream:
            piece = f"{1e6 * (result.cpu_per_request - short[result.way]) / PIECES:.0f}"
        else:
            rate = f"{result.requests_per_second:.0f}"
        rows.append([result.load.name, result.way, f"{1e3 * result.cpu_per_request:.2f}", piece, rate])
    return table(["processor time", "router", "ms/request", "us/piece", "requests/s"], rows)


def peer_if_there(peer: Path) -> Path | None:
    if peer.exists():
        return peer
    print(f"without sglang-router: {peer} isn't there (`make interop` makes it)", file=sys.stderr)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a request failed."""
    p = argparse.ArgumentParser(prog="python -m diptych.bench.router", description=__doc__)
    p.add_argument("--streams", type=int, nargs="+", default=(1, 32, 256))
    p.add_argument("--requests", type=int, default=512, help="on each way, at least one a user and round")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--peer", type=Path, default=PEER, help="interpreter of an environment with sglang-router")
    p.add_argument("--no-peer", action="store_true", help="ours alone")
    p.add_argument("--json", type=Path, help="write the results here")
    args = p.parse_args(argv)
    peer = None if args.no_peer else peer_if_there(args.peer)
    results = []
    loads = [Load(users=SHORT_USERS, stream=False), *(Load(users=n, stream=True) for n in args.streams)]
    for load in loads:
        results += measure(load, args.requests, args.rounds, peer)
        print(f"{load.name}: done", file=sys.stderr)
    print(latency_table(results))
    print()
    print(cpu_table(results))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
