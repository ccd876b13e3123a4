"""256 streams at once over one pair, half of them abandoned at a random moment."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.client import Client
from support.cluster import Cluster, Colocated

STREAMS = 256
TOKENS = 24
PROMPTS = [[(3 + p * 101 + i * (17 + p)) % 40000 for i in range(5 + 3 * p)] for p in range(16)]
FLAGS = ("--dtype", "float32", "--max-total-tokens", "8192")
SETTLED_WITHIN = 20.0


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    """Each prompt's tokens, from a worker that transfers nothing."""
    colocated = Colocated(*FLAGS, model=str(tiny))
    answers = [colocated.client.ok("/generate", body(prompt))["output_ids"] for prompt in PROMPTS]
    colocated.close()
    return answers


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[Cluster]:
    cluster = Cluster(*FLAGS, model=str(tiny))
    yield cluster
    cluster.close()


def body(prompt: list[int]) -> dict[str, object]:
    return {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
    }


async def stream(client: Client, number: int, leaves_after: int | None) -> list[int] | None:
    """Its tokens; None when it was left after that many events."""
    ids: list[int] = []
    async with client.stream("/generate", body(PROMPTS[number % len(PROMPTS)])) as events:
        seen = 0
        async for event in events:
            if seen == leaves_after:
                return None
            seen += 1
            if event != "[DONE]":
                ids = event["output_ids"]
    return ids


def descriptors(cluster: Cluster) -> dict[int, int]:
    """By process id: how many file descriptors it has open."""
    pids = [cluster.router.pid]
    for worker in cluster.workers:
        pids += [worker.launched.pid, worker.launched.scheduler_pid()]
    return {pid: psutil.Process(pid).num_fds() for pid in pids}


async def test_the_half_that_stays_is_right_and_nothing_is_left_of_the_other(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    assert await stream(cluster.client, 0, None) == expected[0]
    before = descriptors(cluster)
    chosen = random.Random(7)
    leaves = {number: chosen.randrange(TOKENS // 2) for number in chosen.sample(range(STREAMS), STREAMS // 2)}
    answers = await asyncio.gather(
        *(stream(cluster.client, number, leaves.get(number)) for number in range(STREAMS))
    )
    for number, answer in enumerate(answers):
        assert answer == (None if number in leaves else expected[number % len(PROMPTS)]), number
    deadline = time.monotonic() + SETTLED_WITHIN
    while any(now > before[pid] for pid, now in descriptors(cluster).items()):
        assert time.monotonic() < deadline, (before, descriptors(cluster))
        await asyncio.sleep(0.1)
    await asyncio.to_thread(cluster.wait_until_idle)
