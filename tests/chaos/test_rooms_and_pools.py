"""Rooms that come twice, requests that are too big, a decode pool that is full, and transfers that are slow.

Rows of the failure table that concern one request or one pool: each ends for the request alone, with the
reason, by its deadline; the pools return to their baseline and the next request is right.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from support.answers import Answer, Clients, assert_error, wait_until
from support.cluster import Cluster
from support.staged import (
    CHUNK,
    HEARTBEAT_S,
    LOST_S,
    PAGES,
    SLACK_S,
    assert_recovered,
    assert_right,
    body,
    new_room,
    prompt,
    rooms_in,
    send_pair,
    stopped,
)

from diptych.common_config.namespaces.disagg import TRANSFER_BACKENDS

TRANSFER_S, HANDSHAKE_S, RECEIVE_S, RETRACTED_S = 4.0, 5.0, 8.0, 7.0
PREFILL_TOKENS, DECODE_TOKENS = 512, 640
FIT = DECODE_TOKENS // 16 // PAGES
"""Prompts in decode's pool at once."""
GROWN = 14
"""Output tokens with which a request no longer fits in the pages of its prompt."""


@pytest.fixture(scope="module", params=TRANSFER_BACKENDS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(
        *("--disaggregation-transfer-backend", request.param, "--dtype", "float32", "--page-size", "16"),
        *("--heartbeat-interval", str(HEARTBEAT_S), "--max-receiving-fraction", "1"),
        *("--transfer-timeout", str(TRANSFER_S), "--handshake-timeout", str(HANDSHAKE_S)),
        *("--receive-timeout", str(RECEIVE_S), "--retracted-timeout", str(RETRACTED_S)),
        *("--bootstrap-timeout", "60", "--enable-fault-injection", "--num-reserved-decode-tokens", "0"),
        prefill_flags=("--chunked-prefill-size", str(CHUNK), "--max-total-tokens", str(PREFILL_TOKENS)),
        decode_flags=("--max-total-tokens", str(DECODE_TOKENS)),
    )
    try:
        yield cluster
    finally:
        cluster.kill()  # the last test kills a worker


@pytest.fixture
def clients(cluster: Cluster) -> Iterator[Clients]:
    with Clients() as clients, cluster.prefill.faults, cluster.decode.faults:
        yield clients


# ---- rooms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["awaiting destination", "receiving", "draining"])
def test_a_room_that_is_active_is_refused_and_its_owner_unharmed(
    cluster: Cluster, clients: Clients, state: str
) -> None:
    prefill, decode = cluster.prefill, cluster.decode
    room = new_room()
    if state == "awaiting destination":
        decode.faults.hold("reserve")
    elif state == "receiving":
        prefill.faults.hold("complete")
    else:
        prefill.faults.stall()
    first = send_pair(cluster, clients, "first", room=room)
    if state == "draining":
        wait_until(lambda: rooms_in(prefill, "finishing") == 1, "pages are in flight")
        assert prefill.client.ok("/abort_request", {"rid": first.rid}) == {"aborted": 1}
    wait_until(lambda: rooms_in(prefill if state[0] == "a" else decode, state) == 1, state)
    second = send_pair(cluster, clients, "second", room=room)
    soon = time.monotonic() + SLACK_S
    assert_error("second", second.decode, {400}, f"{room}", soon)
    if state != "receiving":  # where prefill has done its part
        assert_error("second", second.prefill, {400}, f"{room}", soon)
    else:
        second.prefill.leave()
    for worker in cluster.workers:
        worker.faults.release()
    if state != "draining":
        assert_right("first", first.decode.result(20))
    cluster.wait_until_idle()
    again = send_pair(cluster, clients, "again", room=room)
    assert_right("again", again.decode.result(20))
    assert_recovered(cluster)


def test_a_list_with_a_repeated_room_is_refused(cluster: Cluster) -> None:
    two = {"text": ["a", "b"], "bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": [7, 7]}
    for worker in cluster.workers:
        status, answer = worker.client.post("/generate", two)
        assert (status, answer["error"]["param"]) == (400, "bootstrap_room")


# ---- pools ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [PREFILL_TOKENS + 50, DECODE_TOKENS + 50])
def test_a_prompt_that_fits_no_pool_is_refused_alone(cluster: Cluster, clients: Clients, tokens: int) -> None:
    beside = clients.post(cluster.client, "/generate", body("beside"))
    too_big = body("too big") | {"input_ids": (prompt("too big") * 5)[:tokens]}
    status, answer = cluster.client.post("/generate", too_big)
    assert status == 400, answer
    assert f"{tokens} tokens" in answer["error"]["message"]
    assert_right("beside", beside.result(20))
    assert_recovered(cluster)


def crowd_prompt(rid: str) -> str:
    """Few, so that prefill has most of them cached."""
    return f"crowd of {int(rid.split()[1]) % FIT}"


def crowd(cluster: Cluster, clients: Clients) -> tuple[dict[str, Answer], dict[str, Answer]]:
    """As many as decode's pool holds are running, and twenty wait for pages; by request id."""
    decode = cluster.decode
    decode.faults.gate("compute")

    def send(rids: list[str]) -> dict[str, Answer]:
        bodies = {rid: body(crowd_prompt(rid), rid=rid) for rid in rids}
        return {rid: clients.post(cluster.client, "/generate", body) for rid, body in bodies.items()}

    running = send([f"crowd {i}" for i in range(FIT)])
    wait_until(lambda: decode.load()["num_running_reqs"] == FIT, "the pool is full")
    waiting = send([f"crowd {i}" for i in range(FIT, FIT + 20)])
    wait_until(lambda: rooms_in(decode, "agreed") == 20, "twenty wait for pages")
    return running, waiting


def test_twenty_wait_for_pages_and_all_get_them(cluster: Cluster, clients: Clients) -> None:
    running, waiting = crowd(cluster, clients)
    rid, leaver = waiting.popitem()
    leaver.leave()
    rid, aborted = waiting.popitem()
    cluster.client.ok("/abort_request", {"rid": rid})
    status, content = aborted.result(SLACK_S)
    assert (status, content["meta_info"]["finish_reason"]["type"]) == (200, "abort")
    cluster.decode.faults.release()
    for rid, answer in (running | waiting).items():
        assert_right(crowd_prompt(rid), answer.result(60))
    assert_recovered(cluster)


def test_twenty_wait_for_pages_when_prefill_stops(cluster: Cluster, clients: Clients) -> None:
    running, waiting = crowd(cluster, clients)
    with stopped(cluster.prefill) as at:
        for rid, answer in waiting.items():
            assert_error(rid, answer, {502}, "prefill worker", at + LOST_S + SLACK_S)
        cluster.decode.faults.release()
        for rid, answer in running.items():
            assert_right(crowd_prompt(rid), answer.result(20))
    assert_recovered(cluster)


def retract_one(cluster: Cluster, clients: Clients) -> tuple[str, Answer]:
    """The pool is full, and all in it grow: one is parked, and stays so. The others are done."""
    decode = cluster.decode
    decode.faults.gate("compute")
    names = [f"growing {i}" for i in range(FIT)]
    bodies = {name: body(name, num_tokens=GROWN, rid=name) for name in names}
    answers = {name: clients.post(cluster.client, "/generate", bodies[name]) for name in names}
    wait_until(lambda: decode.load()["num_running_reqs"] == FIT, "the pool is full")
    decode.faults.rules = []
    decode.faults.gate("resume")
    decode.faults.step()
    decode.faults.wait_held(where="resume")
    wait_until(lambda: sum(answer.done for answer in answers.values()) == FIT - 1, "the others are done")
    (parked,) = [name for name, answer in answers.items() if not answer.done]
    return parked, answers[parked]


def test_a_parked_request_is_aborted(cluster: Cluster, clients: Clients) -> None:
    rid, answer = retract_one(cluster, clients)
    cluster.client.ok("/abort_request", {"rid": rid})
    status, content = answer.result(SLACK_S)
    assert (status, content["meta_info"]["finish_reason"]["type"]) == (200, "abort")
    cluster.decode.faults.release()
    assert_recovered(cluster)


def test_the_client_of_a_parked_request_leaves(cluster: Cluster, clients: Clients) -> None:
    _, answer = retract_one(cluster, clients)
    answer.leave()
    wait_until(lambda: cluster.decode.load()["num_waiting_reqs"] == 0, "it is forgotten", 1 + SLACK_S)
    cluster.decode.faults.release()
    assert_recovered(cluster)


def test_a_parked_request_outlives_prefill(cluster: Cluster, clients: Clients) -> None:
    name, answer = retract_one(cluster, clients)
    seen = len(cluster.decode.launched.lines)
    with stopped(cluster.prefill):
        cluster.decode.launched.wait_for_line("lost: ", LOST_S + SLACK_S, after=seen)
        cluster.decode.faults.release()
        assert_right(name, answer.result(20), GROWN)
    assert_recovered(cluster)


def test_a_parked_request_ends_at_its_deadline(cluster: Cluster, clients: Clients) -> None:
    name, answer = retract_one(cluster, clients)
    by = time.monotonic() + RETRACTED_S + SLACK_S
    assert_error(name, answer, {504}, f"no pages became free .* within {RETRACTED_S:g} s", by)
    cluster.decode.faults.release()
    assert_recovered(cluster)


# ---- slow ----------------------------------------------------------------------------------------------


def test_a_slow_receiver_only_delays(cluster: Cluster, clients: Clients) -> None:
    """Decode gets to do something for a moment now and then, and page writes and messages are late."""
    cluster.prefill.faults.inject({"where": "write", "action": "delay", "seconds": 0.2})
    cluster.decode.faults.delay(0.2, "complete", where="receive")
    answers = {name: clients.post(cluster.client, "/generate", body(name)) for name in ("slow 0", "slow 1")}
    scheduler = cluster.decode.launched.scheduler_pid()
    while not all(answer.done for answer in answers.values()):
        os.kill(scheduler, signal.SIGSTOP)
        time.sleep(0.3)  # the fault itself
        os.kill(scheduler, signal.SIGCONT)
        time.sleep(0.1)
    for name, answer in answers.items():
        assert_right(name, answer.result(0))
    for worker in cluster.workers:
        worker.faults.release()
    assert_recovered(cluster)


def test_transfers_that_hang_end_at_their_deadlines(cluster: Cluster, clients: Clients) -> None:
    prefill, decode = cluster.prefill, cluster.decode
    stalled, lost = new_room(), new_room()
    prefill.faults.stall(room=stalled)
    prefill.faults.hold("complete", room=lost)
    began = time.monotonic()
    in_flight = send_pair(cluster, clients, "in flight", room=stalled)
    undelivered = send_pair(cluster, clients, "undelivered", room=lost)
    wait_until(lambda: rooms_in(decode, "receiving") == 2, "two wait for their pages")
    decode.faults.lookup()
    unmet = send_pair(cluster, clients, "unmet")
    for answer in (in_flight.prefill, in_flight.decode):
        reason = f"still in flight after {TRANSFER_S:g} s"
        assert_error("in flight", answer, {504}, reason, began + TRANSFER_S + SLACK_S)
    assert_error("unmet", unmet.decode, {504}, f"within {HANDSHAKE_S:g} s", began + HANDSHAKE_S + SLACK_S)
    reason = f"did not deliver the pages within {RECEIVE_S:g} s"
    assert_error("undelivered", undelivered.decode, {504}, reason, began + RECEIVE_S + SLACK_S)
    unmet.prefill.leave()
    # The stalled bytes may still land; what was only not reported has landed.
    wait_until(lambda: decode.load()["pages_quarantined"] == PAGES, "one room's pages are in doubt")
    assert rooms_in(prefill, "draining") == 1
    for worker in cluster.workers:
        worker.faults.release()
    assert_recovered(cluster)


# ---- the last ------------------------------------------------------------------------------------------


def test_decode_dies_with_a_parked_request(cluster: Cluster) -> None:
    with Clients() as clients:
        name, answer = retract_one(cluster, clients)
        os.kill(cluster.decode.launched.scheduler_pid(), signal.SIGKILL)
        assert_error(name, answer, {502}, "scheduler was ended by signal 9", time.monotonic() + SLACK_S)
    assert cluster.decode.launched.wait() == 1
    cluster.prefill.wait_until_idle()
