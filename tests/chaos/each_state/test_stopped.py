"""A worker that is stopped (SIGSTOP) with a request in every state, and goes on (SIGCONT) later.

What clients get from the other worker, for each state of `support/staged.py`, within two heartbeats:

| state | prefill stops: from decode | decode stops: from prefill |
|---|---|---|
| `running`, `confirming` | the answer: decode has all it needs | `confirming`: 502; `running` has ended |
| `receiving`, `finishing`, `sending`, `waiting` | 502, the link is lost | the same |
| `ahead`, `bootstrapping` | the same | `--bootstrap-timeout`, or 502 by decode once it goes on |
| `preallocating` | 502, the link is lost | the same |
| `handshaking` | 502: the bootstrap service doesn't answer the look-up | the same |
| first contact (`Hello` is not answered) | 502, the link is lost | |

Pages that a stopped worker may still write stay quarantined. Once it goes on its own clients hear that the
link was lost, or get the answer if nothing is missing; every page comes back, the next request is right.
"""

from __future__ import annotations

import time

from support.answers import Clients, assert_error, wait_until
from support.cluster import Cluster
from support.staged import (
    BOOTSTRAP_S,
    LOST_S,
    PAGES,
    SLACK_S,
    Stage,
    assert_recovered,
    assert_right,
    rooms_in,
    send_pair,
    stopped,
)

BY_LINK = ("receiving", "finishing", "sending", "waiting")
UNKNOWN_TO_PREFILL = ("ahead", "bootstrapping", "preallocating", "handshaking")
LINK_LOST = "connection to the control port .* lost"
LOOKUP_S = 3.0
"""A look-up's patience with a bootstrap service that doesn't answer."""


def test_prefill_stops(cluster: Cluster, clients: Clients) -> None:
    stage = Stage(cluster, clients)
    decode = cluster.decode
    with stopped(cluster.prefill) as at:
        soon = at + LOST_S + SLACK_S
        for name in (*BY_LINK, "ahead", "bootstrapping", "preallocating"):
            assert_error(name, stage[name].decode, {502}, f"prefill worker: {LINK_LOST}", soon)
        for name in ("waiting", "preallocating"):
            assert_error(name, stage[f"{name} through the router"].router, {502}, "prefill worker", soon)
        decode.faults.release()
        asked = time.monotonic()
        answer = stage["handshaking"].decode
        assert_error("handshaking", answer, {502}, "bootstrap service", asked + LOOKUP_S + SLACK_S)
        assert_right("running", stage["running"].decode.result(20))
        assert_right("running", stage["running through the router"].router.result(20))
        assert_right("confirming", stage["confirming"].decode.result(20))
        # Of each room that was reserved, `draining` and the router's one too.
        assert decode.load()["pages_quarantined"] == PAGES * (len(BY_LINK) + 2 + 2)
        assert decode.load()["pages_held"] == 0
    cluster.prefill.faults.release()
    continued = time.monotonic()
    for name in (*BY_LINK, "confirming", "ahead", "bootstrapping"):
        assert_error(name, stage[name].prefill, {502}, "", continued + LOST_S + SLACK_S)
    for name in ("preallocating", "handshaking"):
        until = stage[name].began + BOOTSTRAP_S + SLACK_S
        assert_error(name, stage[name].prefill, {502, 504}, "", max(until, continued + SLACK_S))
    assert_recovered(cluster)


def test_decode_stops(cluster: Cluster, clients: Clients) -> None:
    stage = Stage(cluster, clients)
    prefill = cluster.prefill
    with stopped(cluster.decode) as at:
        soon = at + LOST_S + SLACK_S
        for name in (*BY_LINK, "confirming"):
            assert_error(name, stage[name].prefill, {502}, f"decode worker: {LINK_LOST}", soon)
        assert_error("waiting", stage["waiting through the router"].router, {502}, "decode worker", soon)
        # Two writes are in flight to a worker that may be alive.
        assert rooms_in(prefill, "draining") == 2
    continued = time.monotonic()
    cluster.decode.faults.release()
    for name in (*BY_LINK, "ahead", "bootstrapping"):
        assert_error(name, stage[name].decode, {502}, "", continued + LOST_S + SLACK_S)
    assert_right("running", stage["running"].decode.result(20))
    assert_right("running", stage["running through the router"].router.result(20))
    assert_right("confirming", stage["confirming"].decode.result(20))
    for name in UNKNOWN_TO_PREFILL:
        until = stage[name].began + BOOTSTRAP_S + SLACK_S
        assert_error(name, stage[name].prefill, {502, 504}, "", max(until, continued + SLACK_S))
    for name in ("preallocating", "handshaking"):
        # 503: prefill takes nothing of a worker it has lost before what is in flight there has ended.
        assert_error(name, stage[name].decode, {502, 503, 504}, "", continued + BOOTSTRAP_S + SLACK_S)
    prefill.faults.release()
    assert_recovered(cluster)


def test_prefill_stops_at_first_contact(cluster: Cluster, clients: Clients) -> None:
    """The two must not know each other: after a stop they don't."""
    decode = cluster.decode
    assert_recovered(cluster)
    seen = len(decode.launched.lines)
    with stopped(cluster.prefill):
        decode.launched.wait_for_line("prefill worker at .* lost: ", LOST_S + SLACK_S, after=seen)
    with decode.faults:
        decode.faults.hold("hello")
        request = send_pair(cluster, clients, "first contact")
        decode.faults.wait_held(kind="hello")
        wait_until(lambda: rooms_in(decode, "handshaking") == 1, "a request is shaking hands")
        with stopped(cluster.prefill) as at:
            until = at + LOST_S + SLACK_S
            assert_error("first contact", request.decode, {502}, f"prefill worker: {LINK_LOST}", until)
    request.prefill.leave()
    assert_recovered(cluster)
