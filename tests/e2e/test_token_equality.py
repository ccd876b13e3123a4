"""Greedy output equals `transformers`, whatever the page size, the chunk size, the load and the cache."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster
from support.oracle import GreedyOracle
from support.prompts import equality_prompts

from diptych.common_config.namespaces.disagg import TRANSFER_BACKENDS

OUTPUT_TOKENS = 64

# Alone, every combination runs its own share of the prompts, so that each prompt runs alone at one or two
# combinations; DIPTYCH_FULL_MATRIX=1 runs every prompt alone at every combination (some ten minutes more).
FULL_MATRIX = os.environ.get("DIPTYCH_FULL_MATRIX") == "1"
COMBINATIONS = [
    (page, chunk, TRANSFER_BACKENDS[i % len(TRANSFER_BACKENDS)])
    for i, (page, chunk) in enumerate(itertools.product((1, 16, 64), (16, 64, 512)))
]
"""The transfer backends take turns, so that each meets every page size and every chunk size."""


@pytest.fixture(scope="module", params=COMBINATIONS, ids=lambda c: f"page{c[0]}-chunk{c[1]}-{c[2]}")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    page_size, chunk, backend = request.param
    cluster = Cluster(
        *("--dtype", "float32", "--page-size", str(page_size), "--max-total-tokens", "32768"),
        *("--chunked-prefill-size", str(chunk), "--max-running-requests", "16"),
        *("--disaggregation-transfer-backend", backend),
    )
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    return equality_prompts(model_dir)


def body(prompt: list[int]) -> dict[str, object]:
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


def judge(oracle: GreedyOracle, prompts: list[list[int]], answers: list[tuple[int, dict]]) -> int:
    ties = 0
    for prompt, (status, answer) in zip(prompts, answers, strict=True):
        assert status == 200, answer
        assert len(answer["output_ids"]) == OUTPUT_TOKENS
        ties += oracle.near_ties(prompt, answer["output_ids"])
    return ties


def test_sixteen_at_once_cold_then_warm(
    cluster: Cluster, prompts: list[list[int]], oracle: GreedyOracle
) -> None:
    cluster.flush()
    bodies = [body(prompt) for prompt in prompts]
    cold = cluster.client.post_all("/generate", bodies, stagger=0.03)
    cold_ties = judge(oracle, prompts, cold)
    before = cluster.prefill.client.metrics()["diptych_cached_tokens_total"]
    warm = cluster.client.post_all("/generate", bodies, stagger=0.03)
    warm_ties = judge(oracle, prompts, warm)
    cached = cluster.prefill.client.metrics()["diptych_cached_tokens_total"] - before
    # Every whole page of every prompt is cached by now, save the one that holds the last token.
    page_size = cluster.prefill.client.get("/server_info")[1]["record"]["page_size"]
    assert cached == sum((len(prompt) - 1) // page_size * page_size for prompt in prompts)
    for prompt, (_, answer) in zip(prompts, warm, strict=True):
        assert answer["meta_info"]["cached_tokens"] == (len(prompt) - 1) // page_size * page_size
    print(f"near ties: {cold_ties} cold, {warm_ties} warm of {len(prompts) * OUTPUT_TOKENS} tokens each")


def test_alone(
    cluster: Cluster, prompts: list[list[int]], oracle: GreedyOracle, request: pytest.FixtureRequest
) -> None:
    cluster.flush()
    share = COMBINATIONS.index(request.node.callspec.params["cluster"])
    mine = prompts if FULL_MATRIX else prompts[share::6]
    answers = [cluster.client.post("/generate", body(prompt)) for prompt in mine]
    print(f"near ties: {judge(oracle, mine, answers)} of {len(mine) * OUTPUT_TOKENS} tokens")
