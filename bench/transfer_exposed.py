"""What of a transfer a client waits for: the share of TTFT that no computing hides, through the HTTP API.

*Exposed* is the time from the end of a prompt's last forward until the prefill worker has told decode that
every page is there (`diptych_transfer_handover_seconds`, one request at a time, so its growth is that
request's). TTFT beside a colocated worker's, which takes the same prompts in turn, shows the rest: the
router, a second process, the message itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

from diptych.bench.client import CompletionsClient, Target
from diptych.bench.servers import free_port, running_server, server_command
from diptych.bench.table import milliseconds, table
from diptych.bench.workload import make_prompts

LENGTHS = (128, 512, 1024, 2048)
UNCHUNKED = 4096
"""A chunk that no prompt here fills."""
POOL_TOKENS = 16384
"""Of each server, several of which run at once; no prompt comes twice, so the prefix cache is of no use."""
_SUM = "diptych_transfer_handover_seconds_sum"


class Exposure(msgspec.Struct, kw_only=True):
    """Medians, in seconds."""

    backend: str
    prompt_tokens: int
    chunk: int
    overlap: bool
    ttft: float
    colocated_ttft: float
    exposed: float

    @property
    def share(self) -> float:
        return self.exposed / self.ttft


class RequestFailed(Exception):
    """A benchmark of failures measures nothing."""


class _Server:
    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._target = Target(url=url, model=model, output_len=2)
        self._prefill: str | None = None
        self.ttft: list[float] = []
        self.exposed: list[float] = []

    def find_prefill(self) -> None:
        """Behind this server's router."""
        info = msgspec.json.decode(_get(f"{self._url}/server_info"))
        (self._prefill,) = (w["url"] for w in info["workers"] if w["role"] == "prefill")

    async def complete(self, prompt: list[int]) -> None:
        before = self._handover()
        async with CompletionsClient(self._target) as client:
            record = await client.complete(prompt)
        if record.error is not None:
            raise RequestFailed(record.error)
        self.ttft.append(record.ttft)
        self.exposed.append(self._handover() - before)

    def _handover(self) -> float:
        if self._prefill is None:
            return 0.0
        return handover_seconds(_get(f"{self._prefill}/metrics").decode())

    def forget(self) -> None:
        self.ttft, self.exposed = [], []


def handover_seconds(metrics: str) -> float:
    """Of all rooms that a worker has ever handed over, from its Prometheus text."""
    return sum(float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(_SUM))


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def measure(
    backend: str,
    model: str,
    flags: Sequence[str],
    log_dir: Path,
    *,
    chunk: int,
    lengths: Sequence[int],
    repeats: int,
) -> Iterator[Exposure]:
    """Three servers side by side get each prompt in turn; those that have nothing to do sleep. Raises
    `ServerFailed` and `RequestFailed`."""
    common = ["--chunked-prefill-size", str(chunk), "--max-total-tokens", str(POOL_TOKENS), *flags]
    local = [*common, "--disaggregation-transfer-backend", backend]
    with contextlib.ExitStack() as stack:

        def start(name: str, log: str, flags: Sequence[str]) -> _Server:
            port = free_port()
            command = server_command(name, model, port, flags)
            stack.enter_context(running_server(command, log_dir / f"{log}-{backend}-{chunk}.log"))
            return _Server(f"http://127.0.0.1:{port}", model)

        colocated = start("launch-colocated", "colocated", common)
        disaggregated = {
            True: start("launch-local", "overlap", local),
            False: start("launch-local", "no-overlap", [*local, "--disable-overlap-transfer"]),
        }
        servers = [colocated, *disaggregated.values()]
        for server in disaggregated.values():
            server.find_prefill()
        for length in lengths:
            for server in servers:
                server.forget()
            # The first is a warm-up.
            for number, prompt in enumerate(make_prompts(repeats + 1, length, 32000, seed=length)):
                for server in servers:
                    asyncio.run(server.complete(prompt))
                    if number == 0:
                        server.forget()
            for overlap, server in disaggregated.items():
                yield Exposure(
                    backend=backend,
                    prompt_tokens=length,
                    chunk=chunk,
                    overlap=overlap,
                    ttft=median(server.ttft),
                    colocated_ttft=median(colocated.ttft),
                    exposed=median(server.exposed),
                )


def exposure_table(exposures: Sequence[Exposure]) -> str:
    rows = [
        [
            f"{e.backend}, {e.prompt_tokens} tokens",
            str(e.chunk),
            "yes" if e.overlap else "no",
            milliseconds(e.colocated_ttft),
            milliseconds(e.ttft),
            milliseconds(e.exposed),
            f"{e.share:.2%}",
            milliseconds(e.ttft - e.colocated_ttft),
        ]
        for e in exposures
    ]
    header = ["", "chunk", "overlap", "colocated TTFT", "TTFT (ms)", "exposed", "share", "TTFT - coloc."]
    return table(header, rows)
