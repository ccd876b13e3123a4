"""What processes do and leave behind: kill -9 of any of them, signals, idle CPU."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from support.client import Client
from support.cluster import MODEL, Cluster
from support.processes import (
    Launched,
    children_of,
    command_line,
    cpu_seconds,
    eventually_no_processes,
    processes_of_this_run,
)

BODY = {"prompt": "The sea", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "The sea", "max_tokens": 3000, "ignore_eos": True}

IDLE_SECONDS = float(os.environ.get("DIPTYCH_IDLE_SECONDS", "10"))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster("--max-total-tokens", "8192")
    yield cluster
    cluster.kill()


def roles(cluster: Cluster) -> dict[str, int]:
    return {
        "prefill frontend": cluster.prefill.launched.pid,
        "prefill scheduler": cluster.prefill.launched.scheduler_pid(),
        "decode frontend": cluster.decode.launched.pid,
        "decode scheduler": cluster.decode.launched.scheduler_pid(),
        "router": cluster.router.pid,
    }


@pytest.mark.parametrize(
    "victim", ["prefill frontend", "prefill scheduler", "decode frontend", "decode scheduler", "router"]
)
def test_kill_9_while_requests_run_leaves_nothing(cluster: Cluster, victim: str) -> None:
    assert cluster.client.ok("/v1/completions", BODY)["choices"][0]["text"]
    pid = roles(cluster)[victim]

    async def kill_in_the_middle() -> list[Any]:
        events = []
        async with cluster.client.stream("/v1/completions", LONG) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == 3:
                    os.kill(pid, signal.SIGKILL)
                if len(events) > 30:
                    break
        return events

    if victim == "router":
        with pytest.raises(aiohttp.ClientError):
            asyncio.run(kill_in_the_middle())
    else:
        events = asyncio.run(kill_in_the_middle())
        # A stream that has all its pages goes on without prefill; without decode it ends with the reason.
        assert any("error" in event for event in events) == victim.startswith("decode")

    # A worker that lost one of its processes is gone altogether, with an exit code that says so; the others
    # have given everything back.
    for worker in cluster.workers:
        if victim.startswith(worker.launched.command.removeprefix("launch-")):
            assert worker.launched.wait() != 0
        else:
            worker.wait_until_idle()
    cluster.kill()
    assert eventually_no_processes() == []


def test_a_restarted_prefill_on_the_same_ports_serves_the_next_request() -> None:
    cluster = Cluster("--max-total-tokens", "8192")
    try:
        expected = cluster.client.ok("/v1/completions", BODY)["choices"][0]["text"]
        old = cluster.prefill.launched
        port, bootstrap = old.url.rpartition(":")[2], old.bootstrap_port
        old.kill()
        ports = ("--port", port, "--disaggregation-bootstrap-port", bootstrap)
        again = Launched("launch-prefill", "--model-path", MODEL, *ports, "--max-total-tokens", "8192")
        try:
            again.ready()
            cluster.router.wait_for_line(r"prefill worker \S+ is up", 30)
            deadline = time.monotonic() + 20
            while True:
                status, answer = cluster.client.post("/v1/completions", BODY)
                if status == 200 or time.monotonic() > deadline:
                    break
                time.sleep(0.2)
            assert status == 200, answer
            assert answer["choices"][0]["text"] == expected
            cluster.decode.wait_until_idle()
            again.stop()
        finally:
            again.kill()
    finally:
        cluster.kill()


def test_sigterm_lets_a_running_request_finish() -> None:
    cluster = Cluster("--max-total-tokens", "8192")
    try:

        async def finish() -> list[Any]:
            events = []
            body = {**BODY, "max_tokens": 60, "ignore_eos": True}
            async with cluster.client.stream("/v1/completions", body) as stream:
                async for event in stream:
                    events.append(event)
                    if len(events) == 2:
                        cluster.decode.launched.signal(signal.SIGTERM)
            return events

        events = asyncio.run(finish())
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert cluster.decode.launched.wait() == 0
        cluster.prefill.wait_until_idle()
    finally:
        cluster.kill()


def test_a_client_that_leaves_frees_both_workers_within_a_second(cluster: Cluster) -> None:
    async def leave() -> None:
        async with cluster.client.stream("/v1/completions", LONG) as stream:
            async for _ in stream:
                break

    cluster.client.ok("/v1/completions", BODY)
    asyncio.run(leave())
    left = time.monotonic()
    for worker in cluster.workers:
        worker.wait_until_idle()
    assert time.monotonic() - left < 1.0


def test_idle_processes_use_under_one_percent_of_a_core() -> None:
    """All of `launch-local`, after it has served, over DIPTYCH_IDLE_SECONDS."""
    local = Launched("launch-local", "--model-path", MODEL, "--port", "0", "--max-total-tokens", "8192")
    try:
        local.ready()
        Client(local.url).ok("/v1/completions", BODY)
        pids = processes_of_this_run()
        assert len(pids) == 6  # launch-local, router, two frontends, two schedulers
        before = {pid: cpu_seconds(pid) for pid in pids}
        time.sleep(IDLE_SECONDS)
        for pid, seconds in before.items():
            share = (cpu_seconds(pid) - seconds) / IDLE_SECONDS
            assert share < 0.01, f"{command_line(pid)!r} uses {share:.1%} of a core"
        local.stop()
    finally:
        local.kill()
    assert eventually_no_processes() == []


def test_kill_9_of_launch_local_ends_everything() -> None:
    local = Launched("launch-local", "--model-path", MODEL, "--port", "0", "--max-total-tokens", "8192")
    local.ready()
    assert children_of(local.pid)
    local.kill()
    assert eventually_no_processes() == []
