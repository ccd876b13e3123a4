"""A client that aborts or leaves while its request is in a state: every state, at either worker.

| state (`support/staged.py`) | aborted at decode: prefill's answer | aborted at prefill: decode's answer |
|---|---|---|
| `receiving`, `finishing`, `sending`, `waiting` | abort, at once | abort, at once |
| `ahead`, `bootstrapping`, `preallocating` | abort, at once | abort, once decode asks for the pages |
| `handshaking` | goes on until aborted there: decode knows nobody | abort, once decode asks for pages |
| `running` | has answered | has answered |
| `confirming` | the answer, once the pages are confirmed | goes on: it has all it needs |

An abort is answered with status 200 and `finish_reason` abort. Requests beside it notice nothing.
"""

from __future__ import annotations

import time

from support.answers import Answer, Clients, wait_until
from support.cluster import Cluster, Worker
from support.staged import (
    PAGES,
    SLACK_S,
    Stage,
    assert_recovered,
    assert_right,
)

BOUND = ("receiving", "finishing", "sending", "waiting")
"""Both workers know which rooms belong together."""
TOLD_BY_DECODE = (*BOUND, "ahead", "bootstrapping", "preallocating")
AT_ONCE_S = 1.0


def abort(worker: Worker, stage: Stage, name: str) -> None:
    answer = worker.client.ok("/abort_request", {"rid": stage[name].rid})
    assert answer == {"aborted": 1}, name


def assert_aborted(name: str, answer: Answer, seconds: float = AT_ONCE_S + SLACK_S) -> None:
    status, content = answer.result(seconds)
    assert status == 200, f"{name}: {content}"
    assert content["meta_info"]["finish_reason"]["type"] == "abort", f"{name}: {content}"


def assert_others_are_right(stage: Stage) -> None:
    for name in ("running", "waiting", "preallocating"):
        assert_right(f"{name}", stage[f"{name} through the router"].router.result(30))


def test_abort_at_decode(cluster: Cluster, clients: Clients) -> None:
    stage = Stage(cluster, clients)
    for name in (*TOLD_BY_DECODE, "handshaking", "running", "confirming"):
        abort(cluster.decode, stage, name)
        assert_aborted(name, stage[name].decode)
        if name in TOLD_BY_DECODE:
            assert_aborted(name, stage[name].prefill)
    assert not stage["handshaking"].prefill.done
    abort(cluster.prefill, stage, "handshaking")
    assert_aborted("handshaking", stage["handshaking"].prefill)
    # Prefill may still write for these, for all that decode can know.
    assert cluster.decode.load()["pages_quarantined"] >= 2 * PAGES
    stage.release()
    status, content = stage["confirming"].prefill.result(20)
    assert status == 200, content
    assert_others_are_right(stage)
    assert_recovered(cluster)


def test_abort_at_prefill(cluster: Cluster, clients: Clients) -> None:
    stage = Stage(cluster, clients)
    later = ("ahead", "bootstrapping", "preallocating", "handshaking")
    for name in (*BOUND, *later, "confirming"):
        abort(cluster.prefill, stage, name)
        assert_aborted(name, stage[name].prefill)
        if name in BOUND:
            assert_aborted(name, stage[name].decode)
    stage.release()
    for name in later:
        assert_aborted(name, stage[name].decode, 20)
    assert_right("confirming", stage["confirming"].decode.result(20))
    assert_right("running", stage["running"].decode.result(20))
    assert_others_are_right(stage)
    assert_recovered(cluster)


def test_client_leaves(cluster: Cluster, clients: Clients) -> None:
    """Its own connection closes; where it talks to a router, that closes both of its own."""
    stage = Stage(cluster, clients)
    for staged in stage:
        for answer in staged.legs.values():
            answer.leave()
    left = time.monotonic()
    for worker in cluster.workers:
        wait_until(lambda worker=worker: nothing_runs(worker), "no request is left", AT_ONCE_S + SLACK_S)
    assert time.monotonic() - left < AT_ONCE_S + SLACK_S
    stage.release()
    assert_recovered(cluster)


def nothing_runs(worker: Worker) -> bool:
    load = worker.load()
    return load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0
