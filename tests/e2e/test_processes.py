"""What a worker's processes do and leave behind: kill -9 of any, restarts, SIGTERM, clients that leave."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from support.cluster import Cluster
from support.processes import eventually_no_processes, eventually_only, processes_of_this_run

BODY = {"prompt": "The sea", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "The sea", "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    # Longer than any answer here takes, also on a loaded machine.
    cluster = Cluster("--max-total-tokens", "8192", "--shutdown-timeout", "60")
    yield cluster
    cluster.kill()
    assert eventually_no_processes() == []


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """Whole again, whatever the test before has ended, and in service."""
    ended = [worker for worker in started.workers if worker.launched.exit_code is not None]
    for worker in ended:
        started.launch_again(worker.launched.command.removeprefix("launch-"))
    for worker in ended:
        worker.launched.ready()
    if started.router.exit_code is not None:
        started.launch_router()
    serves(started)
    return started


def serves(cluster: Cluster) -> str:
    """The text of a short answer, once the router has seen that both workers are there."""
    deadline = time.monotonic() + 20
    while True:
        status, answer = cluster.client.post("/v1/completions", BODY)
        if status == 200:
            text: str = answer["choices"][0]["text"]
            assert text
            return text
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)


def roles(cluster: Cluster) -> dict[str, int]:
    return {
        "prefill frontend": cluster.prefill.launched.pid,
        "prefill scheduler": cluster.prefill.launched.scheduler_pid(),
        "decode frontend": cluster.decode.launched.pid,
        "decode scheduler": cluster.decode.launched.scheduler_pid(),
        "router": cluster.router.pid,
    }


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


@pytest.mark.parametrize(
    "victim", ["prefill frontend", "prefill scheduler", "decode frontend", "decode scheduler", "router"]
)
def test_kill_9_while_requests_run_leaves_nothing_and_a_restart_on_the_same_ports_serves(
    cluster: Cluster, victim: str
) -> None:
    expected = serves(cluster)
    pids = roles(cluster)
    assert sorted(pids.values()) == sorted(processes_of_this_run())

    async def kill_in_the_middle() -> list[Any]:
        events = []
        async with cluster.client.stream("/v1/completions", LONG) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == 3:
                    os.kill(pids[victim], signal.SIGKILL)
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
    # are there and have given everything back.
    role = victim.split()[0]
    for worker in cluster.workers:
        if worker.launched.command == f"launch-{role}":
            assert worker.launched.wait() != 0
        else:
            worker.wait_until_idle()
    survivors = {pid for name, pid in pids.items() if not name.startswith(role)}
    assert eventually_only(survivors) == survivors

    if role == "router":
        cluster.router.wait()
        cluster.launch_router()
    else:
        cluster.launch_again(role)
        {"prefill": cluster.prefill, "decode": cluster.decode}[role].launched.ready()
    assert serves(cluster) == expected
    cluster.wait_until_idle()


def test_sigterm_lets_a_running_request_finish(cluster: Cluster) -> None:
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
