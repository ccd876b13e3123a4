"""Who gets a turn, in which order, and what becomes of those who don't."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from diptych.router.admission import Admission
from diptych.router.errors import RouterError


class Metrics:
    def __init__(self):
        self.causes = []
        self.waits = 0

    def turned_away(self, cause):
        self.causes.append(cause)

    def waited(self, seconds):
        self.waits += 1


@pytest.fixture
def metrics():
    return Metrics()


class Request:
    """One that holds its turn until told."""

    def __init__(self, admission):
        self.entered = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission):
        async with admission.turn():
            self.entered.set()
            await self.leave.wait()

    async def end(self):
        self.leave.set()
        await self.task

    async def cancel(self):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_limit_lets_everyone_in(metrics):
    admission = Admission(None, 0, 1, metrics)
    requests = [Request(admission) for _ in range(50)]
    await settle()
    assert all(r.entered.is_set() for r in requests)
    for request in requests:
        await request.end()


async def test_turns_are_given_first_come_first_served(metrics):
    admission = Admission(2, 10, 60, metrics)
    requests = [Request(admission) for _ in range(5)]
    await settle()
    assert [r.entered.is_set() for r in requests] == [True, True, False, False, False]
    assert admission.queued == 3
    for number in range(3):
        await requests[number].end()
        await settle()
        assert [r.entered.is_set() for r in requests] == [True] * (number + 3) + [False] * (2 - number)
    for request in requests[3:]:
        await request.end()
    late = Request(admission)
    await settle()
    assert late.entered.is_set()
    await late.end()
    assert (admission.queued, metrics.waits) == (0, 3)


async def test_a_full_queue_is_a_429_at_once(metrics):
    admission = Admission(1, 1, 60, metrics)
    running, waiting = Request(admission), Request(admission)
    await settle()
    with pytest.raises(RouterError, match="max-concurrent-requests") as raised:
        async with admission.turn():
            raise AssertionError
    assert (raised.value.status, raised.value.retry_after) == (429, 1)
    assert metrics.causes == ["full"]
    await running.end()
    await waiting.end()


async def test_a_wait_beyond_the_limit_is_a_429_and_takes_no_turn(metrics):
    admission = Admission(1, 5, 0.01, metrics)
    running = Request(admission)
    await settle()
    with pytest.raises(RouterError, match="queue-timeout") as raised:
        async with admission.turn():
            raise AssertionError
    assert raised.value.status == 429
    assert (metrics.causes, admission.queued) == (["timeout"], 0)
    await running.end()
    next_one = Request(admission)
    await settle()
    assert next_one.entered.is_set()
    await next_one.end()


async def test_a_client_that_leaves_gives_its_place_up(metrics):
    admission = Admission(1, 2, 60, metrics)
    first, leaves, second = (Request(admission) for _ in range(3))
    await settle()
    await leaves.cancel()
    assert admission.queued == 1
    await first.end()
    await settle()
    assert second.entered.is_set()
    await second.end()


async def test_a_client_that_leaves_just_as_its_turn_comes_passes_it_on(metrics):
    admission = Admission(1, 2, 60, metrics)
    first, leaves, second = (Request(admission) for _ in range(3))
    await settle()
    first.leave.set()
    await asyncio.sleep(0)  # the turn is given, and not taken yet
    assert not leaves.entered.is_set()
    await leaves.cancel()
    await settle()
    assert second.entered.is_set()
    await second.end()
    await first.task


async def test_closing_turns_away_those_who_wait_and_leaves_those_who_run(metrics):
    admission = Admission(1, 2, 60, metrics)
    running, waiting = Request(admission), Request(admission)
    await settle()
    admission.close()
    with pytest.raises(RouterError) as raised:
        await waiting.task
    assert raised.value.status == 503
    await running.end()
