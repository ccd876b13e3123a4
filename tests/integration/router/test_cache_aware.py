"""What the default policy makes of prompts that share beginnings, beside round robin."""

from __future__ import annotations

import pytest

from diptych.bench.echo_worker import EchoSettings
from diptych.bench.prefix_workload import WORKLOADS, Shape, ideal_hit_rate
from diptych.bench.routing import echo_cluster, run_sessions, summed_up

SETTINGS = EchoSettings(cache_pages=600, seconds_per_prompt_token=5e-6)
SHAPE = Shape(requests=300, groups=15, turns=5)


async def result(kit, policy, name, sessions):
    async with (
        echo_cluster(3, SETTINGS) as (workers, flags),
        kit.router([], [], "--policy", policy, *flags) as router,
    ):
        ttfts = await run_sessions(router.url, sessions, concurrency=16)
        ideal = ideal_hit_rate(sessions, SETTINGS.page_size)
        return summed_up(name, policy, ideal, [w.totals for w in workers], ttfts, 0.0)


@pytest.mark.parametrize("name", ["skewed", "conversations"])
async def test_three_workers_hit_as_if_they_were_one_and_share_the_work(kit, name):
    """Each worker's cache holds what a third of the prompts need: only who knows where they are can hit."""
    sessions = WORKLOADS[name](SHAPE)
    aware = await result(kit, "cache_aware", name, sessions)
    blind = await result(kit, "round_robin", name, sessions)
    assert (aware.failed, blind.failed) == (0, 0)
    assert aware.hit_rate >= 0.9 * aware.ideal_hit_rate
    assert aware.request_imbalance <= 1.3
    assert aware.compute_imbalance <= 1.3
    assert blind.hit_rate < 0.8 * blind.ideal_hit_rate
