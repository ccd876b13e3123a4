"""Clusters that each have their own configuration: what may differ does no harm, what must not is named on
both legs, and then everybody goes on serving peers that match."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import support
from support.client import Client
from support.cluster import MODEL, Worker
from support.oracle import GreedyOracle
from support.processes import Launched
from support.prompts import equality_prompts

COMMON = ("--model-path", MODEL, "--port", "0", "--dtype", "float32")
PREFILL = (*COMMON, "--disaggregation-bootstrap-port", "0", "--chunked-prefill-size", "64")
SMALL = ("--max-total-tokens", "4096")
LARGE = ("--max-total-tokens", "8192")
OUTPUT_TOKENS = 24

rooms = itertools.count(1)


class Clusters:
    """Two pairs of workers: page size 16, and page size 32 with a prefill attention that takes whole prompts
    only. In both pairs prefill's chunk and pool sizes are other ones than decode's."""

    def __init__(self, stack: ExitStack) -> None:
        whole = {"script": Path(support.__file__).with_name("whole_prompts.py")}
        launched = [
            Launched("launch-prefill", *PREFILL, *SMALL),
            Launched("launch-decode", *COMMON, *LARGE),
            Launched(
                "launch-prefill",
                *PREFILL,
                *SMALL,
                *("--page-size", "32", "--prefill-attention-backend", "torch_native"),
                **whole,
            ),
            Launched("launch-decode", *COMMON, *LARGE, "--page-size", "32"),
        ]
        for one in launched:
            stack.callback(one.kill)
        self.workers = [Worker(one.ready()) for one in launched]
        self.prefill, self.decode, self.whole_prefill, self.decode_32 = self.workers


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    with ExitStack() as stack:
        clusters = Clusters(stack)
        yield clusters
        for worker in clusters.workers:
            worker.wait_until_idle()
            worker.launched.stop()


def pair_of(prefill: Worker) -> dict[str, object]:
    """The fields that make a request one of a pair."""
    port = int(prefill.launched.bootstrap_port)
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": next(rooms)}


def generate(prefill: Worker, decode: Worker, prompt: list[int]) -> dict[str, Any]:
    """Both legs at once, as a router sends them; decode's answer."""
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, **pair_of(prefill)}

    async def both() -> list[tuple[int, Any]]:
        legs = (worker.client.request("POST", "/generate", body) for worker in (prefill, decode))
        return list(await asyncio.gather(*legs))

    (prefill_status, _), (status, answer) = asyncio.run(both())
    assert (prefill_status, status) == (200, 200), answer
    assert isinstance(answer, dict)
    return answer


def refused(prefill: Worker, decode: Worker, words: list[str]) -> None:
    """Both legs name the words, within a second."""
    body = {"prompt": "The sea", "max_tokens": 4, "temperature": 0, **pair_of(prefill)}
    started = time.monotonic()
    for worker in (decode, prefill):
        status, answer = worker.client.post("/v1/completions", body)
        assert status >= 500
        assert all(word in answer["error"]["message"] for word in words), answer
    # Not by waiting for a deadline, all of which are longer.
    assert time.monotonic() - started < 1


def schedule_of(worker: Worker) -> dict[str, Any]:
    status, info = worker.client.get("/server_info")
    assert status == 200
    schedule: dict[str, Any] = info["scheduler"]["bags"]["schedule"]
    return schedule


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    """One longer than prefill's chunk, one longer than both sides'."""
    by_length = {len(prompt): prompt for prompt in equality_prompts(model_dir)}
    return [by_length[length] for length in (129, 513)]


def test_each_cluster_has_its_own_chunk_and_pool_size_and_the_tokens_are_right(
    clusters: Clusters, prompts: list[list[int]], oracle: GreedyOracle
) -> None:
    prefill, decode = clusters.prefill, clusters.decode
    assert (schedule_of(prefill)["page_size"], schedule_of(decode)["page_size"]) == (16, 16)
    assert schedule_of(prefill)["chunked_prefill_size"] == 64
    assert schedule_of(decode)["chunked_prefill_size"] == 512
    assert (prefill.load()["pages_total"], decode.load()["pages_total"]) == (4096 // 16, 8192 // 16)
    for prompt in prompts:
        answer = generate(prefill, decode, prompt)
        assert len(answer["output_ids"]) == OUTPUT_TOKENS
        oracle.near_ties(prompt, answer["output_ids"])


def test_another_page_size_is_refused_and_both_go_on_with_peers_that_match(
    clusters: Clusters, prompts: list[list[int]], oracle: GreedyOracle
) -> None:
    refused(clusters.prefill, clusters.decode_32, ["page_size: 32 at decode, 16 at prefill"])
    refused(clusters.whole_prefill, clusters.decode, ["page_size: 16 at decode, 32 at prefill"])
    pairs = [(clusters.prefill, clusters.decode), (clusters.whole_prefill, clusters.decode_32)]
    for prefill, decode in pairs:
        answer = generate(prefill, decode, prompts[0])
        oracle.near_ties(prompts[0], answer["output_ids"])
    for worker in clusters.workers:
        worker.wait_until_idle()


MISMATCHES = {
    "what pages store": (
        ("--kv-cache-dtype", "bfloat16"),
        ["kv_dtype: bfloat16 at decode, float32 at prefill"],
    ),
    "model and dtype, both named": (
        ("--load-format", "dummy", "--dtype", "bfloat16"),
        [" model: ", " dtype: bfloat16 at decode, float32 at prefill"],
    ),
}


@pytest.mark.parametrize("difference", MISMATCHES)
def test_a_client_reads_what_differs_and_the_next_request_is_served(
    clusters: Clusters, difference: str, prompts: list[list[int]], oracle: GreedyOracle
) -> None:
    flags, words = MISMATCHES[difference]
    prefill = clusters.prefill
    with ExitStack() as stack:
        launched = Launched("launch-decode", *COMMON, *SMALL, *flags)
        stack.callback(launched.kill)
        decode = Worker(launched.ready())
        refused(prefill, decode, words)
        router = Launched(
            "launch-router",
            *("--prefill", prefill.launched.url, prefill.launched.bootstrap_port),
            *("--decode", decode.launched.url, "--port", "0"),
        )
        stack.callback(router.kill)
        status, answer = Client(router.ready().url).post("/v1/completions", {"prompt": "The sea"})
        assert status >= 500
        assert all(word in answer["error"]["message"] for word in words), answer
        decode.wait_until_idle()
        router.stop()
        launched.stop()
    answer = generate(prefill, clusters.decode, prompts[0])
    oracle.near_ties(prompts[0], answer["output_ids"])


def test_a_prefix_cache_that_prefills_attention_rules_out_is_off_for_scheduler_pool_and_transfer(
    clusters: Clusters, prompts: list[list[int]], oracle: GreedyOracle
) -> None:
    prefill, decode = clusters.whole_prefill, clusters.decode_32
    _, info = prefill.client.get("/server_info")
    gated = {
        "disable_chunked_prefix_cache": True,
        "chunked_prefill_size": -1,
        "chunked_prefill_enabled": False,
        "prefill_token_budget": info["scheduler"]["runner"]["context_length"],
    }
    # The bag says what is in effect, who changed it is logged, and the record says what was asked.
    assert gated.items() <= info["scheduler"]["bags"]["schedule"].items()
    overrides = [entry for entry in info["scheduler"]["overrides"] if entry["source"] != "control socket"]
    assert {entry["leaf"]: entry["new"] for entry in overrides} == gated
    assert {entry["source"] for entry in overrides} == {
        "attention backend torch_native can't attend to a cached prefix"
    }
    assert info["record"]["chunked_prefill_size"] == 64
    assert info["record"]["disable_chunked_prefix_cache"] is False
    # What decode is told is what is in effect; its own chunk size is its own affair.
    route = f"http://127.0.0.1:{prefill.launched.bootstrap_port}/route"
    with urllib.request.urlopen(route, timeout=10) as answer:
        assert gated.items() <= json.loads(answer.read())["published"]["schedule"].items()
    assert schedule_of(decode)["chunked_prefill_size"] == 512

    # Prompts go whole, nothing of the first serves the second, and every page of both crosses.
    prompt = prompts[-1]
    before = prefill.client.metrics()
    outputs = []
    for _ in range(2):
        answer = generate(prefill, decode, prompt)
        assert answer["meta_info"]["cached_tokens"] == 0
        outputs.append(answer["output_ids"])
    assert outputs[0] == outputs[1]
    oracle.near_ties(prompt, outputs[0])
    after = prefill.client.metrics()
    assert after["diptych_prefill_tokens_total"] - before["diptych_prefill_tokens_total"] == 2 * len(prompt)
    pages = {
        name: sum(v for k, v in samples.items() if k.startswith("diptych_transfer_pages_total"))
        for name, samples in (("before", before), ("after", after))
    }
    assert pages["after"] - pages["before"] == 2 * -(-len(prompt) // 32)
    # Beside it, in the same run, an attention that can attend to a prefix.
    for cached in (0, 512):
        answer = generate(clusters.prefill, clusters.decode, [7, *prompt])
        assert answer["meta_info"]["cached_tokens"] == cached


def test_a_router_with_mixed_up_urls_says_so(clusters: Clusters) -> None:
    nobody, prefill = "http://127.0.0.1:9", clusters.prefill.launched.url
    launched = Launched("launch-router", "--prefill", nobody, "--decode", prefill, "--port", "0")
    try:
        launched.wait_for_line(r"decode worker \S+ gets no requests: it is a prefill worker", 20)
    finally:
        launched.kill()
