"""A decode pool that can't hold all requests at once: they take turns and lose no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, Colocated, Worker
from support.oracle import GreedyOracle
from support.prompts import equality_prompts

SMALL_POOL = ("--max-total-tokens", "512", "--num-reserved-decode-tokens", "0")
OUTPUT_TOKENS = 120


@pytest.fixture(scope="module", params=["disaggregated", "colocated"])
def served(request: pytest.FixtureRequest) -> Iterator[Cluster | Colocated]:
    started: Callable[[], Cluster | Colocated] = {
        "disaggregated": lambda: Cluster("--dtype", "float32", decode_flags=SMALL_POOL),
        "colocated": lambda: Colocated("--dtype", "float32", *SMALL_POOL),
    }[request.param]
    served = started()
    yield served
    served.close()


def decoding(served: Cluster | Colocated) -> Worker:
    return served.decode if isinstance(served, Cluster) else served.worker


def test_retracted_requests_resume_with_the_same_tokens(
    served: Cluster | Colocated, model_dir: Path, oracle: GreedyOracle
) -> None:
    prompts = [prompt for prompt in equality_prompts(model_dir) if len(prompt) < 70][:10]
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]
    answers = served.client.post_all("/generate", bodies)
    for prompt, (status, answer) in zip(prompts, answers, strict=True):
        assert status == 200, answer
        assert len(answer["output_ids"]) == OUTPUT_TOKENS
        oracle.near_ties(prompt, answer["output_ids"])
    worker = decoding(served)
    assert worker.client.metrics()["diptych_retractions_total"] > 0
    worker.wait_until_idle()


def test_a_request_that_could_outgrow_the_pool_is_refused_alone(served: Cluster | Colocated) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}
    status, answer = served.client.post("/generate", {"text": "The sea", "sampling_params": sampling})
    assert status == 400, answer
    assert "the context of 512" in answer["error"]["message"]
    decoding(served).wait_until_idle()
    answer = served.client.ok("/v1/completions", {"prompt": "The sea", "max_tokens": 4})
    assert answer["usage"]["completion_tokens"] == 4
