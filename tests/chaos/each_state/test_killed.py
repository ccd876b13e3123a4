"""`kill -9` of a worker that has a request in every state, then a new one on the same ports.

What clients get, for each state of `support/staged.py` (within two heartbeats unless said otherwise):

| state | prefill dies: from decode | decode dies: from prefill |
|---|---|---|
| `running`, `confirming` | the answer: decode has all it needs | `confirming`: 502; `running` has ended |
| `receiving`, `finishing`, `sending`, `waiting` | 502, the link is lost | 502, the link is lost |
| `draining` | ended before; pages come back by proof of death | the same |
| `ahead`, `bootstrapping` | 502, the link is lost | 504 at `--bootstrap-timeout`: no decode worker is known |
| `preallocating` | 502, the link is lost | the same |
| `handshaking` | 502 once it asks: nobody listens there | the same |

From the worker that died: an error by its frontend if that still lives, else the connection breaks. Through
the router: a 502 or 503 that names the worker. RETRACTED is in `tests/chaos/test_rooms_and_pools.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import aiohttp
from support.answers import Answer, Clients, assert_error, wait_until
from support.cluster import Cluster, Worker
from support.staged import (
    BOOTSTRAP_S,
    LOST_S,
    SLACK_S,
    Stage,
    assert_recovered,
    assert_right,
)

BY_LINK = {"receiving", "finishing", "sending", "waiting"}
BY_THE_ROUTER = {
    "running through the router",
    "waiting through the router",
    "preallocating through the router",
}
UNKNOWN_TO_PREFILL = {"ahead", "bootstrapping", "preallocating", "handshaking"}
"""Prefill can't know which decode worker these wait for."""
LINK_LOST = "connection to the control port .* lost"


def kill_worker(worker: Worker) -> None:
    scheduler = worker.launched.scheduler_pid()
    os.kill(scheduler, signal.SIGKILL)
    worker.launched.signal(signal.SIGKILL)


def kill_scheduler(worker: Worker) -> None:
    os.kill(worker.launched.scheduler_pid(), signal.SIGKILL)


KILL: dict[str, dict[str, Callable[[Worker], None]]] = {
    "nixl": {"prefill": kill_scheduler, "decode": kill_worker},
    "mooncake": {"prefill": kill_worker, "decode": kill_scheduler},
}
"""Who tells clients doesn't depend on the library, so each way is tried with one."""


def assert_ended_by_death(name: str, answer: Answer, until: float, *, status: int = 503) -> None:
    """From the dead worker: its frontend says so, or the connection ends."""
    with contextlib.suppress(aiohttp.ClientError):
        got, content = answer.result(max(0.0, until - time.monotonic()))
        assert got == status, f"{name}: {got} {content}"
        assert "scheduler was ended by signal 9" in content["error"]["message"]


def launch_again(cluster: Cluster, role: str, worker: Worker) -> None:
    """As soon as the killed one is gone; `wait_for_it` waits until it serves."""
    assert worker.launched.wait() != 0
    cluster.launch_again(role)


def wait_for_it(cluster: Cluster, worker: Worker) -> None:
    worker.launched.ready()

    def router_knows() -> bool:
        samples = cluster.client.metrics()
        healthy = [v for k, v in samples.items() if k.startswith("diptych_router_worker_healthy{")]
        return healthy == [1, 1]

    wait_until(router_knows, "the router finds both workers healthy")


def test_prefill_dies(backend: str, cluster: Cluster, clients: Clients) -> None:
    stage = Stage(cluster, clients)
    died = time.monotonic()
    KILL[backend]["prefill"](cluster.prefill)
    soon = died + LOST_S + SLACK_S
    for name in sorted(BY_LINK | {"ahead", "bootstrapping", "preallocating"}):
        assert_error(name, stage[name].decode, {502}, f"prefill worker: {LINK_LOST}", soon)
    for name in sorted(BY_LINK | UNKNOWN_TO_PREFILL | {"confirming"}):
        assert_ended_by_death(name, stage[name].prefill, soon)
    for name in sorted(BY_THE_ROUTER - {"running through the router"}):
        assert_error(name, stage[name].router, {502, 503}, "prefill worker", soon)
    launch_again(cluster, "prefill", cluster.prefill)
    assert not stage["handshaking"].decode.done
    cluster.decode.faults.release()
    released = time.monotonic()
    assert_error("handshaking", stage["handshaking"].decode, {502}, "bootstrap service", released + SLACK_S)
    for name, answer in after_prefill(stage):
        assert_right(name, answer.result(20))
    # By proof of death, while nobody serves there yet or somebody else does.
    cluster.decode.wait_until_idle()
    wait_for_it(cluster, cluster.prefill)
    assert_recovered(cluster)


def after_prefill(stage: Stage) -> list[tuple[str, Answer]]:
    """Requests that need nothing of prefill any more."""
    router = stage["running through the router"].router
    return [
        ("running", stage["running"].decode),
        ("running", router),
        ("confirming", stage["confirming"].decode),
    ]


def test_decode_dies(backend: str, cluster: Cluster, clients: Clients) -> None:
    stage = Stage(cluster, clients)
    died = time.monotonic()
    KILL[backend]["decode"](cluster.decode)
    soon = died + LOST_S + SLACK_S
    for name in sorted(BY_LINK | {"confirming"}):
        assert_error(name, stage[name].prefill, {502}, f"decode worker: {LINK_LOST}", soon)
    for name in sorted(BY_LINK | UNKNOWN_TO_PREFILL):
        assert_ended_by_death(name, stage[name].decode, soon)
    for name in ("confirming", "running"):
        # Not a 503 once there is output: a router would run such a request again.
        assert_ended_by_death(name, stage[name].decode, soon, status=500)
    for name in sorted(BY_THE_ROUTER):
        statuses = {502} if name.startswith("running") else {502, 503}
        assert_error(name, stage[name].router, statuses, "decode worker", soon)
    launch_again(cluster, "decode", cluster.decode)
    for name in sorted(UNKNOWN_TO_PREFILL):
        until = stage[name].began + BOOTSTRAP_S + SLACK_S
        assert_error(name, stage[name].prefill, {504}, "no decode worker reserved pages within", until)
    cluster.prefill.faults.release()
    # What is draining is given up by proof of death.
    cluster.prefill.wait_until_idle()
    wait_for_it(cluster, cluster.decode)
    assert_recovered(cluster)
