"""Time without a byte, of which only the router's own waiting counts."""

from __future__ import annotations

import asyncio
import time

from diptych.router.silence import LAST_CHANCE, SilenceWatch


async def test_a_wait_beyond_the_limit_is_reported_once():
    reported = asyncio.Event()
    watch = SilenceWatch(0.02, reported.set)
    watch.waiting()
    began = time.monotonic()
    await asyncio.wait_for(reported.wait(), 5)
    assert time.monotonic() - began >= 0.02
    reported.clear()
    await asyncio.sleep(0.1 + LAST_CHANCE)
    assert not reported.is_set()


async def test_what_came_while_the_loop_was_busy_is_no_silence():
    reported = asyncio.Event()
    watch = SilenceWatch(0.05, reported.set)
    watch.waiting()
    time.sleep(0.1)  # noqa: ASYNC251 (the loop is held up on purpose)
    asyncio.get_running_loop().call_later(LAST_CHANCE / 2, watch.heard)
    await asyncio.sleep(0.3)
    assert not reported.is_set()
    watch.stop()


async def test_time_in_which_nobody_waits_does_not_count():
    reported = asyncio.Event()
    watch = SilenceWatch(0.02, reported.set)
    watch.waiting()
    watch.heard()
    await asyncio.sleep(0.2)
    assert not reported.is_set()
    watch.stop()
