"""Faults injected over HTTP into real workers: states that are held for as long as a test likes, and what the
client sees."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support.cluster import Cluster, Worker
from support.faults import gate_rule

DEADLINE = 5.0
PROMPT_TOKENS = 150
"""Three chunks."""
FLAGS = (
    *("--enable-fault-injection", "--dtype", "float32", "--max-total-tokens", "4096"),
    *("--bootstrap-timeout", str(DEADLINE), "--receive-timeout", str(DEADLINE), "--disable-radix-cache"),
)

prompts = itertools.count(1)
expected: dict[int, list[int]] = {}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(*FLAGS, prefill_flags=("--chunked-prefill-size", "64"))
    try:
        yield cluster
        cluster.close()
    finally:
        cluster.kill()


@pytest.fixture
def prefill(cluster: Cluster) -> Iterator[Worker]:
    with cluster.prefill.faults:
        yield cluster.prefill


@pytest.fixture
def decode(cluster: Cluster) -> Iterator[Worker]:
    with cluster.decode.faults:
        yield cluster.decode


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def request() -> dict[str, Any]:
    """The same prompt each time, so that one undisturbed answer is the measure of all."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return {"input_ids": [1000 + 7 * i for i in range(PROMPT_TOKENS)], "sampling_params": sampling}


def tokens(answer: Any) -> list[int]:
    ids: list[int] = answer["output_ids"]
    return ids


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[int]:
    return tokens(cluster.client.ok("/generate", request()))


def start(pool: ThreadPoolExecutor, cluster: Cluster) -> Future[tuple[int, Any]]:
    return pool.submit(cluster.client.post, "/generate", request())


def rooms(worker: Worker, state: str) -> float:
    return worker.client.metrics()[f'diptych_transfer_rooms{{backend="nixl",state="{state}"}}']


HOLDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("prefill", {"where": "send", "action": "hold", "kind": "complete"}, "decode", "receiving"),
    ("prefill", {"where": "write", "action": "stall"}, "prefill", "finishing"),
    ("prefill", gate_rule("compute", skip=1), "prefill", "sending"),
    ("prefill", gate_rule("admit"), "prefill", "ready"),
    ("decode", {"where": "send", "action": "hold", "kind": "reserve"}, "prefill", "awaiting destination"),
    ("decode", {"where": "lookup", "action": "hold"}, "decode", "handshaking"),
    ("decode", gate_rule("preallocate"), "decode", "agreed"),
]


@pytest.mark.parametrize(("at", "rule", "where", "state"), HOLDS, ids=[entry[3] for entry in HOLDS])
def test_a_held_state_lasts_until_the_release_and_the_answer_is_right(
    cluster: Cluster,
    prefill: Worker,
    decode: Worker,
    pool: ThreadPoolExecutor,
    undisturbed: list[int],
    at: str,
    rule: dict[str, Any],
    where: str,
    state: str,
) -> None:
    workers = {"prefill": prefill, "decode": decode}
    faults = workers[at].faults
    faults.inject(rule)
    answer = start(pool, cluster)
    held = faults.wait_held(1)
    assert {(entry["where"], entry["action"]) for entry in held} == {(rule["where"], rule["action"])}
    give_up = time.monotonic() + 4
    while rooms(workers[where], state) != 1:
        assert time.monotonic() < give_up, workers[where].client.metrics()
    assert not answer.done()
    faults.release()
    status, body = answer.result(20)
    assert status == 200, body
    assert tokens(body) == undisturbed
    assert faults.held() == []


def test_decode_steps_once_for_each_step_that_is_let_go(
    cluster: Cluster, decode: Worker, pool: ThreadPoolExecutor, undisturbed: list[int]
) -> None:
    before = decode.client.metrics()["diptych_decode_tokens_total"]
    decode.faults.gate("compute", skip=2)
    answer = start(pool, cluster)
    for steps in (2, 3, 4):
        decode.faults.wait_held(1, where="compute")
        assert decode.client.metrics()["diptych_decode_tokens_total"] == before + steps
        assert decode.load()["num_running_reqs"] == 1
        decode.faults.step()
    decode.faults.release()
    status, body = answer.result(20)
    assert status == 200, body
    assert tokens(body) == undisturbed


def test_a_lost_reservation_ends_both_legs_at_their_deadlines_and_leaves_no_page(
    cluster: Cluster, decode: Worker, undisturbed: list[int]
) -> None:
    decode.faults.drop("reserve", count=1)
    began = time.monotonic()
    status, answer = cluster.client.post("/generate", request())
    assert status == 504, answer
    assert f"within {DEADLINE:g} s" in answer["error"]["message"]
    assert time.monotonic() - began < DEADLINE + 2
    cluster.wait_until_idle()
    assert decode.faults.fired() == 1
    fired = 'diptych_transfer_faults_injected_total{action="drop",backend="nixl",where="send"}'
    assert decode.client.metrics()[fired] == 1
    assert tokens(cluster.client.ok("/generate", request())) == undisturbed


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"rules": [{"where": "send", "action": "stall"}]}, "rules[0].action"),
        (
            {"rules": [{"where": "send", "action": "drop"}, {"where": "nowhere", "action": "drop"}]},
            "rules[1].where",
        ),
        ({"rules": [{"where": "send", "action": "drop", "probability": 2}]}, "rules[0].probability"),
        ({"release": "yes"}, "release"),
        ({"rules": [{"action": "drop"}]}, "rules[0].where"),
    ],
)
def test_a_bad_rule_is_refused_by_its_field_and_changes_nothing(
    decode: Worker, change: dict[str, Any], param: str
) -> None:
    decode.faults.drop("reserve", room=1)
    before = decode.faults.state()
    status, answer = decode.client.post("/faults", change)
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert decode.faults.state() == before
