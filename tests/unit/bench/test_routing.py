"""The benchmark of routing policies: its workloads, its arithmetic, and one short run of the command."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from diptych.bench.echo_worker import Totals
from diptych.bench.prefix_workload import WORKLOADS, Shape, ideal_hit_rate
from diptych.bench.routing import main, summed_up

SMALL = Shape(requests=40, groups=4, system_tokens=160, question_tokens=16, turns=4)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_for_the_same_seed_and_has_as_many_requests_as_asked_for(name):
    sessions = WORKLOADS[name](SMALL)
    assert sessions == WORKLOADS[name](SMALL)
    assert sessions != WORKLOADS[name](Shape(requests=40, groups=4, turns=4, seed=1))
    assert sum(map(len, sessions)) == 40


def test_each_turn_of_a_conversation_begins_with_the_one_before():
    for session in WORKLOADS["conversations"](SMALL):
        for before, after in itertools.pairwise(session):
            assert after["messages"][: len(before["messages"])] == before["messages"]


def test_the_ideal_misses_each_beginning_once():
    sessions = WORKLOADS["system_prompts"](SMALL)
    # 36 of 40 requests find their system prompt of 160 tokens, in prompts of a little above 176.
    assert 0.75 < ideal_hit_rate(sessions, 16) < 36 / 40


def test_what_workers_counted_becomes_rates():
    prefill = [
        Totals(requests=30, prompt_tokens=300, cached_tokens=200),
        Totals(requests=10, prompt_tokens=100, cached_tokens=100),
    ]
    result = summed_up("w", "p", 0.8, prefill, [0.3, math.nan, 0.1, 0.2], 1.0)
    assert (result.hit_rate, result.failed, result.ttft_p50) == (0.75, 1, 0.2)
    assert (result.request_imbalance, result.compute_imbalance) == (1.5, 2.0)


def test_the_command_runs_a_router_of_its_own_and_finds_cache_aware_better(tmp_path, capsys):
    report = tmp_path / "report.json"
    policies = ("--policy", "cache_aware", "round_robin")
    sizes = ("--num-requests", "60", "--groups", "9", "--concurrency", "6", "--cache-pages", "250")
    assert main([*policies, "--workload", "skewed", *sizes, "--json", str(report)]) == 0
    assert "cache_aware" in capsys.readouterr().out
    aware, blind = json.loads(report.read_bytes())
    assert aware["hit_rate"] > blind["hit_rate"]
