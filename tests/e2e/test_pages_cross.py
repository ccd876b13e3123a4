"""KV pages really travel: what `/metrics` counts, and who computed what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.client import Client
from support.cluster import MODEL, Cluster, Worker
from support.processes import Launched

from diptych.common_config.namespaces.disagg import TRANSFER_BACKENDS

PAGE_SIZE = 16


@pytest.fixture(scope="module", params=TRANSFER_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def flags(backend: str) -> tuple[str, ...]:
    pool = ("--page-size", str(PAGE_SIZE), "--max-total-tokens", "16384")
    return (*pool, "--disaggregation-transfer-backend", backend)


@pytest.fixture(scope="module")
def cluster(flags: tuple[str, ...]) -> Iterator[Cluster]:
    cluster = Cluster(*flags)
    yield cluster
    cluster.close()


PROMPT = [(100 + j * 31) % 40000 for j in range(1500)]
"""Three chunks."""


def delta(before: dict[str, float], after: dict[str, float], prefix: str) -> float:
    return sum(after[k] - before.get(k, 0.0) for k in after if k.startswith(prefix))


def test_bytes_are_pages_times_page_bytes_and_decode_never_runs_the_prompt(cluster: Cluster) -> None:
    lengths = [1, 16, 17, 700, 1500]
    before = [worker.client.metrics() for worker in cluster.workers]
    for i, length in enumerate(lengths):
        ids = [(100 + i * 7919 + j * 31) % 40000 for j in range(length)]
        cluster.client.ok(
            "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
        )
    cluster.wait_until_idle()
    prefill, decode = (
        lambda name, b=b, w=w: delta(b, w.client.metrics(), name)
        for b, w in zip(before, cluster.workers, strict=True)
    )
    pages = sum(-(-length // PAGE_SIZE) for length in lengths)
    page_bytes = 30 * 2 * 3 * PAGE_SIZE * 64 * 2  # layers, K and V, KV heads, tokens, head_dim, bfloat16
    assert prefill("diptych_transfer_pages_total") == pages
    assert prefill("diptych_transfer_bytes_total") == pages * page_bytes
    assert prefill("diptych_transfer_write_seconds_sum") > 0
    # Pages of one prompt are adjacent on both sides: one descriptor per chunk that was sent.
    chunks = sum(-(-length // 512) for length in lengths)
    assert 0 < prefill("diptych_transfer_descriptors_total") <= chunks

    assert prefill("diptych_prefill_tokens_total") == sum(lengths)
    assert decode("diptych_prefill_tokens_total") == 0
    assert decode("diptych_transfer_bytes_received_total") == pages * page_bytes
    assert decode("diptych_decode_tokens_total") == 4 * len(lengths)
    assert prefill("diptych_decode_tokens_total") == 0


def test_without_overlap_all_pages_leave_together_and_the_tokens_are_the_same(
    cluster: Cluster, flags: tuple[str, ...]
) -> None:
    def tokens_and_descriptors(client: Client, prefill: Worker) -> tuple[list[int], float]:
        prefill.client.ok("/flush_cache", {})
        before = prefill.client.metrics()
        sampling = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
        answer = client.ok("/generate", {"input_ids": PROMPT, "sampling_params": sampling})
        prefill.wait_until_idle()
        cluster.wait_until_idle()
        after = prefill.client.metrics()
        return answer["output_ids"], delta(before, after, "diptych_transfer_descriptors_total")

    cluster.wait_until_idle()
    with ExitStack() as stack:
        # Another prefill worker for the same decode worker: the flag is prefill's alone.
        prefill = Launched(
            *("launch-prefill", "--model-path", MODEL, "--port", "0", "--disaggregation-bootstrap-port", "0"),
            *(*flags, "--disable-overlap-transfer"),
        )
        stack.callback(prefill.kill)
        together = Worker(prefill.ready())
        router = Launched(
            *("launch-router", "--prefill", prefill.url, prefill.bootstrap_port),
            *("--decode", cluster.decode.launched.url, "--port", "0"),
        )
        stack.callback(router.kill)
        tokens, descriptors = tokens_and_descriptors(Client(router.ready().url), together)
        router.stop()
        prefill.stop()
    # All pages of pools that nobody uses are one run: had any left before the last chunk, it would be more.
    assert descriptors == 1
    assert tokens_and_descriptors(cluster.client, cluster.prefill) == (tokens, 3)
