"""Prefill and decode on two hosts: tokens over the network, and what a network that goes away does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.cluster import MODEL, Cluster
from support.hosts import Host, two_hosts
from support.oracle import greedy_oracle

from diptych.common_config.namespaces.disagg import TRANSFER_BACKENDS
from diptych.engine.weights.cache import default_cache_dir
from diptych.engine.weights.source import prepare_model

HEARTBEAT_S = 2.0
OUTAGE_S = 5.0
"""Longer than two heartbeats."""
SLACK_S = 3.0
"""For a machine whose cores are all busy."""
LOOKUP_S = 3.0
"""A look-up's patience with a bootstrap service that doesn't answer."""
PAGE_SIZE = 16
LONG = [(100 + i * 31) % 40000 for i in range(800)]
"""13 chunks, each sent while the next is computed."""
SHORT = [(7 + i * 17) % 40000 for i in range(50)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="module", params=TRANSFER_BACKENDS)
def cluster(request: pytest.FixtureRequest, hosts: tuple[Host, Host]) -> Iterator[Cluster]:
    """One worker on each host, with the flags of README's section on different machines. The router is on
    neither, and stays in touch with both."""
    prefill, decode = hosts
    cluster = Cluster(
        *("--disaggregation-transfer-backend", request.param),
        *("--dtype", "float32"),
        *("--page-size", str(PAGE_SIZE), "--max-total-tokens", "4096", "--chunked-prefill-size", "64"),
        *("--heartbeat-interval", str(HEARTBEAT_S)),
        launch_prefill=prefill.launch,
        launch_decode=decode.launch,
    )
    try:
        yield cluster
        cluster.close()
    finally:
        cluster.kill()


@pytest.fixture(autouse=True)
def nothing_is_cached(cluster: Cluster) -> None:
    cluster.flush()


def generate(cluster: Cluster, ids: list[int], num_tokens: int = 8) -> tuple[int, Any, float]:
    """Status, answer, seconds."""
    began = time.monotonic()
    parameters = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    status, answer = cluster.client.post("/generate", {"input_ids": ids, "sampling_params": parameters})
    return status, answer, time.monotonic() - began


def assert_right(cluster: Cluster, ids: list[int]) -> None:
    """Answered at the first try, with the tokens that `transformers` gives; and nothing stays behind."""
    status, answer, _ = generate(cluster, ids)
    assert status == 200, answer
    assert_tokens(ids, answer, 8)
    cluster.wait_until_idle()


def assert_tokens(ids: list[int], answer: Any, number: int) -> None:
    assert len(answer["output_ids"]) == number
    oracle = greedy_oracle(prepare_model(MODEL, cache_dir=default_cache_dir(), report=print))
    assert oracle.near_ties(ids, answer["output_ids"]) <= number // 8


def pages_sent(cluster: Cluster) -> float:
    samples = cluster.prefill.client.metrics().items()
    return sum(value for name, value in samples if name.startswith("diptych_transfer_pages_total"))


def wait_for_pages(cluster: Cluster, number: float, seconds: float = 30.0) -> None:
    """Until prefill has posted that many pages in all."""
    deadline = time.monotonic() + seconds
    while pages_sent(cluster) < number:
        assert time.monotonic() < deadline, cluster.prefill.launched.output
        time.sleep(0.02)


def test_pages_cross_the_link_and_tokens_are_right(cluster: Cluster, hosts: tuple[Host, Host]) -> None:
    _, decode = hosts
    before, sent_before = decode.bytes_received(), pages_sent(cluster)
    assert_right(cluster, LONG)
    assert pages_sent(cluster) - sent_before == len(LONG) // PAGE_SIZE
    page_bytes = 30 * 2 * 3 * PAGE_SIZE * 64 * 4  # layers, K and V, KV heads, tokens, head_dim, float32
    assert decode.bytes_received() - before >= len(LONG) // PAGE_SIZE * page_bytes


def test_outage_mid_transfer_fails_the_request_and_frees_pages_when_it_ends(
    cluster: Cluster, hosts: tuple[Host, Host]
) -> None:
    prefill, _ = hosts
    sent = pages_sent(cluster)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(generate, cluster, LONG)
        wait_for_pages(cluster, sent + 1)
        with prefill.link_down():
            began = time.monotonic()
            wait_for_pages(cluster, pages_sent(cluster) + 1)  # which now can't arrive
            status, error, _ = answer.result(timeout=60)
            assert status == 502, error
            assert "connection to the control port" in error["error"]["message"]
            assert time.monotonic() - began < 2 * HEARTBEAT_S + SLACK_S
            time.sleep(max(0.0, began + OUTAGE_S - time.monotonic()))
            # Bytes may still lie in either host's socket buffers, and would land once the link is back.
            assert cluster.decode.load()["pages_quarantined"] == len(LONG) // PAGE_SIZE
    cluster.wait_until_idle()
    assert_right(cluster, SHORT)


def test_outage_shorter_than_the_heartbeats_only_delays_the_request(
    cluster: Cluster, hosts: tuple[Host, Host]
) -> None:
    _, decode = hosts
    sent = pages_sent(cluster)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(generate, cluster, LONG)
        wait_for_pages(cluster, sent + 1)
        with decode.link_down():
            time.sleep(HEARTBEAT_S / 4)
        status, body, _ = answer.result(timeout=60)
    assert status == 200, body
    assert_tokens(LONG, body, 8)
    cluster.wait_until_idle()


def test_outage_between_transfers_is_noticed_answered_and_forgotten(
    cluster: Cluster, hosts: tuple[Host, Host]
) -> None:
    _, decode = hosts
    seen = [len(worker.launched.lines) for worker in cluster.workers]
    with ThreadPoolExecutor() as pool:
        decoding = pool.submit(generate, cluster, SHORT, 100)
        deadline = time.monotonic() + 30
        while not cluster.decode.load()["num_running_reqs"]:
            assert time.monotonic() < deadline, cluster.decode.launched.output
            time.sleep(0.02)
        with decode.link_down():
            for worker, lines in zip(cluster.workers, seen, strict=True):
                worker.launched.wait_for_line("lost: ", 2 * HEARTBEAT_S + SLACK_S, after=lines)
            status, error, seconds = generate(cluster, SHORT)
            assert status == 502, error
            assert "bootstrap service" in error["error"]["message"]
            assert seconds < LOOKUP_S + SLACK_S
        # Decode had all that it needs of prefill before.
        status, body, _ = decoding.result(timeout=60)
    assert status == 200, body
    assert_tokens(SHORT, body, 100)
    cluster.wait_until_idle()
    assert_right(cluster, SHORT)
