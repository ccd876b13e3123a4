"""`sglang-router` before our workers gives what our own router does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster
from support.oracle import GreedyOracle

from .conftest import ClientEnvironment
from .reassembled import reassembled, unchanging
from .requests_of_each_kind import REQUESTS
from .sglang_router import SglangRouter, assert_quiet

OPENAI = [
    "chat",
    "chat n",
    "chat stop",
    "chat logprobs",
    "chat json_schema",
    "chat tool required",
    "completion",
    "completion n",
    "completion batch",
    "completion echo",
    "completion of nothing but the prompt",
]
"""Not token ids and responses, which it refuses itself."""

GREEDY = {"temperature": 0, "max_new_tokens": 4}
GENERATE: dict[str, dict[str, Any]] = {
    "text": {"text": "The sea", "sampling_params": GREEDY},
    "n": {"text": "The sea", "sampling_params": {"n": 2, "sampling_seed": 3, "max_new_tokens": 4}},
    "batch": {"input_ids": [[504, 3575], [504]], "sampling_params": GREEDY},
    "logprobs": {
        "input_ids": [504, 3575, 282],
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    },
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster("--dtype", "float32", "--max-total-tokens", "8192", "--tool-call-parser", "hermes")
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def sglang(
    cluster: Cluster, clients: ClientEnvironment, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangRouter]:
    router = SglangRouter(
        clients,
        cluster.prefill.launched,
        cluster.decode.launched,
        model_dir,
        tmp_path_factory.mktemp("sglang_router"),
    )
    try:
        yield router
    finally:
        router.close()


def same(answer: Any, expected: Any) -> bool:
    """It parses and writes logprobs anew, with fewer digits."""
    if isinstance(expected, dict):
        return answer.keys() == expected.keys() and all(same(answer[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(answer) == len(expected) and all(map(same, answer, expected))
    if isinstance(expected, float):
        return answer == pytest.approx(expected, abs=1e-5)
    return bool(answer == expected)


def parsed(answer: Any) -> Any:
    """Where it has joined prompt logprobs it doesn't say that its answer is JSON."""
    return json.loads(answer) if isinstance(answer, str) else answer


def path_of(resource: str) -> str:
    return "/v1/" + resource.replace(".", "/")


def test_openai_requests_are_answered_as_by_our_router(cluster: Cluster, sglang: SglangRouter) -> None:
    for route in ("/v1/chat/completions", "/v1/completions"):
        names = [name for name in OPENAI if path_of(REQUESTS[name][0]) == route]
        assert len(names) >= 5
        bodies = [REQUESTS[name][1] for name in names]
        answers = sglang.client.post_all(route, bodies)
        expected = cluster.client.post_all(route, bodies)
        for name, (status, answer), (_, ours) in zip(names, answers, expected, strict=True):
            assert status == 200, f"{name}: {answer}"
            assert same(unchanging(parsed(answer)), unchanging(ours)), f"{name}: {answer} instead of {ours}"


@pytest.mark.parametrize(
    "name", ["chat", "chat n", "chat logprobs", "chat tool required", "completion batch"]
)
def test_streams_add_up_to_the_whole_answer(name: str, cluster: Cluster, sglang: SglangRouter) -> None:
    resource, body = REQUESTS[name]
    events = sglang.client.events(path_of(resource), {**body, "stream_options": {"include_usage": True}})
    expected = cluster.client.ok(path_of(resource), body)
    assert len(events) > 3
    assert same(unchanging(reassembled(events)), unchanging(expected)), events


@pytest.mark.parametrize("name", GENERATE)
def test_generate_is_answered_as_by_our_router(name: str, cluster: Cluster, sglang: SglangRouter) -> None:
    """Prompt logprobs too: once, though it joins both legs' lists."""
    answer = parsed(sglang.client.ok("/generate", GENERATE[name]))
    expected = cluster.client.ok("/generate", GENERATE[name])
    assert same(tokens(answer), tokens(expected))
    events = sglang.client.events("/generate", GENERATE[name])
    if name == "text":
        assert same(tokens(events[-1]), tokens(expected))
    if name == "logprobs":
        positions = [token for _, token, _ in answer["meta_info"]["input_token_logprobs"]]
        assert positions == GENERATE[name]["input_ids"]


def tokens(answer: Any) -> Any:
    """What doesn't differ between two answers to one request."""
    if isinstance(answer, list):
        return [tokens(sample) for sample in answer]
    meta = {name: value for name, value in unchanging(answer["meta_info"]).items() if name != "e2e_latency"}
    return {**answer, "meta_info": meta}


def test_what_it_relays_is_what_transformers_says(sglang: SglangRouter, oracle: GreedyOracle) -> None:
    prompt = [504, 3575, 282, 260]
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 12}}
    output = sglang.client.ok("/generate", body)["output_ids"]
    assert len(output) == 12
    assert oracle.near_ties(prompt, output) <= 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_that_is_back_serves_again(role: str, cluster: Cluster, sglang: SglangRouter) -> None:
    asked = {"model": "any", **GENERATE["text"]}
    expected = tokens(cluster.client.ok("/generate", asked))
    worker = {"prefill": cluster.prefill, "decode": cluster.decode}[role]
    assert_quiet(cluster)
    worker.launched.kill()
    status, answer = sglang.client.post("/generate", asked)
    assert status >= 500, answer
    cluster.launch_again(role)
    worker.launched.ready()
    sglang.wait_until_ready()
    assert same(tokens(sglang.client.ok("/generate", asked)), expected)


def test_workers_take_its_probes_and_requests_quietly(cluster: Cluster, sglang: SglangRouter) -> None:
    assert sglang.client.ok("/generate", GENERATE["text"])["text"]
    cluster.wait_until_idle()
    assert_quiet(cluster)
