"""Greedy output equals `transformers`, whatever the page size, the chunk size, the load and the cache.

A file for each page size, so that they can run side by side."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.cluster import Cluster
from support.oracle import GreedyOracle
from support.prompts import equality_prompts

from diptych.common_config.namespaces.disagg import TRANSFER_BACKENDS


class Combination(NamedTuple):
    page_size: int
    chunk_size: int
    backend: str

    def __str__(self) -> str:
        return f"page{self.page_size}-chunk{self.chunk_size}-{self.backend}"


COMBINATIONS = [
    Combination(page_size, chunk_size, TRANSFER_BACKENDS[i % len(TRANSFER_BACKENDS)])
    for i, (page_size, chunk_size) in enumerate(itertools.product((1, 16, 64), (512, 64, 16)))
]
"""The transfer backends take turns, so that each meets every page size and every chunk size."""

# Chunks, transfer and prefix cache are over when decode begins, and its first step reads all that they left.
# So outputs are LONG at three combinations, which have every page size, chunk size and backend among them. At
# the others they are SHORT. The prompt of 2,000 tokens, four of the largest chunks, is in the crowd at one.
# Each prompt runs alone at one combination. DIPTYCH_FULL_MATRIX=1 runs every prompt in the crowd and alone at
# every combination, and all of them LONG (some fifteen minutes more).
FULL_MATRIX = os.environ.get("DIPTYCH_FULL_MATRIX") == "1"
LONG, SHORT = 33 if not FULL_MATRIX else 64, 17
"""Tokens. 17 begin a new page of 16, wherever the prompt ended; 33 begin two."""
LONGEST_PROMPT = 2000
LONGEST_AT = (1, 512)
LONG_AT = {(1, 512), (16, 16), (64, 64)}


def of_page_size(page_size: int) -> list[Combination]:
    """What one test file is for."""
    return [combination for combination in COMBINATIONS if combination.page_size == page_size]


@pytest.fixture(scope="module")
def combination(request: pytest.FixtureRequest) -> Combination:
    """`parametrize` of each file gives it, indirectly."""
    combination: Combination = request.param
    return combination


@pytest.fixture(scope="module")
def cluster(combination: Combination) -> Iterator[Cluster]:
    cluster = Cluster(
        *("--dtype", "float32", "--max-total-tokens", "32768", "--max-running-requests", "16"),
        *("--page-size", str(combination.page_size), "--chunked-prefill-size", str(combination.chunk_size)),
        *("--disaggregation-transfer-backend", combination.backend),
    )
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    return equality_prompts(model_dir)


def output_tokens(combination: Combination) -> int:
    return LONG if FULL_MATRIX or combination[:2] in LONG_AT else SHORT


def bodies(prompts: list[list[int]], tokens: int) -> list[dict[str, object]]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]


def judge(
    oracle: GreedyOracle, prompts: list[list[int]], answers: list[tuple[int, dict]], tokens: int
) -> int:
    ties = 0
    for prompt, (status, answer) in zip(prompts, answers, strict=True):
        assert status == 200, answer
        assert len(answer["output_ids"]) == tokens
        ties += oracle.near_ties(prompt, answer["output_ids"])
    return ties


def test_sixteen_at_once_cold_then_warm(
    cluster: Cluster, combination: Combination, prompts: list[list[int]], oracle: GreedyOracle
) -> None:
    """Sixteen at once, cold and then with a warm cache."""
    cluster.flush()
    tokens = output_tokens(combination)
    if not FULL_MATRIX and combination[:2] != LONGEST_AT:
        prompts = [prompt for prompt in prompts if len(prompt) < LONGEST_PROMPT]
    requests = bodies(prompts, tokens)
    cold = cluster.client.post_all("/generate", requests, stagger=0.03)
    cold_ties = judge(oracle, prompts, cold, tokens)
    before = cluster.prefill.client.metrics()["diptych_cached_tokens_total"]
    warm = cluster.client.post_all("/generate", requests, stagger=0.03)
    warm_ties = judge(oracle, prompts, warm, tokens)
    cached = cluster.prefill.client.metrics()["diptych_cached_tokens_total"] - before
    # Every whole page of every prompt is cached by now, save the one that holds the last token.
    page_size = cluster.prefill.client.get("/server_info")[1]["record"]["page_size"]
    assert cached == sum((len(prompt) - 1) // page_size * page_size for prompt in prompts)
    for prompt, (_, answer) in zip(prompts, warm, strict=True):
        assert answer["meta_info"]["cached_tokens"] == (len(prompt) - 1) // page_size * page_size
    print(f"near ties: {cold_ties} cold, {warm_ties} warm of {len(prompts) * tokens} tokens each")


def test_alone(
    cluster: Cluster, combination: Combination, prompts: list[list[int]], oracle: GreedyOracle
) -> None:
    cluster.flush()
    mine = prompts if FULL_MATRIX else prompts[COMBINATIONS.index(combination) :: len(COMBINATIONS)]
    tokens = output_tokens(combination)
    answers = [cluster.client.post("/generate", body) for body in bodies(mine, tokens)]
    print(f"near ties: {judge(oracle, mine, answers, tokens)} of {len(mine) * tokens} tokens")
