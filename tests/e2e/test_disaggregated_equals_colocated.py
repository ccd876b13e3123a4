"""Everything a client can see is the same from router-over-PD and from one colocated worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.client import Client
from support.cluster import MODEL, Cluster, Colocated

FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "16"),
    *("--tool-call-parser", "hermes"),
)

CHAT = [{"role": "user", "content": "Write three sentences about a lighthouse."}]

KEEPER = {
    "name": "find_keeper",
    "parameters": {
        "type": "object",
        "properties": {"lighthouse": {"type": "string", "maxLength": 20}, "night": {"type": "boolean"}},
        "required": ["lighthouse", "night"],
        "additionalProperties": False,
    },
}
TOOLS = {
    "tools": [{"type": "function", "function": KEEPER}, {"type": "function", "function": {"name": "ring"}}],
    "parallel_tool_calls": False,
    "max_tokens": 120,
}

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_k of one": {"temperature": 1.0, "top_k": 1},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all filters": {"temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "repetition penalty": {"temperature": 0, "repetition_penalty": 1.3},
    "presence penalty": {"temperature": 0, "presence_penalty": 1.5},
    "frequency penalty": {"temperature": 0.7, "frequency_penalty": 1.1},
    "stop string": {"temperature": 0, "stop": ["light"]},
    "stop strings": {"temperature": 0, "stop": ["\n", "house"]},
    "stop token": {"temperature": 0, "stop_token_ids": [28, 30]},
    "ignore eos": {"temperature": 0, "ignore_eos": True, "max_tokens": 120},
    "min tokens": {"temperature": 0, "min_tokens": 30, "stop_token_ids": [28, 30]},
    "logit bias": {"temperature": 0, "logit_bias": {"260": -100, "1165": 5}},
    "logprobs": {"temperature": 0.9, "logprobs": True, "top_logprobs": 5},
    "one token": {"temperature": 0, "max_tokens": 1},
    "one token with logprobs": {"temperature": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": 2},
    "two samples": {"temperature": 1.0, "n": 2},
    "required call": {"temperature": 0.8, **TOOLS, "tool_choice": "required"},
    "named call": {
        "temperature": 1.2,
        **TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "find_keeper"}},
    },
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(*FLAGS)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def colocated() -> Iterator[Colocated]:
    colocated = Colocated(*FLAGS)
    yield colocated
    colocated.close()


def same(left: Any, right: Any, path: str = "") -> None:
    """Equal but for ids and times; logprobs to 1e-4."""
    if isinstance(left, dict):
        ignored = {"id", "created", "system_fingerprint", "e2e_latency"}
        assert left.keys() - ignored == right.keys() - ignored, path
        for key in left.keys() - ignored:
            same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            same(a, b, f"{path}[{i}]")
    elif isinstance(left, float):
        assert left == pytest.approx(right, abs=1e-4), path
    else:
        assert left == right, path


def chat_body(case: str) -> dict[str, Any]:
    # A seed makes the draw repeatable.
    return {"model": MODEL, "messages": CHAT, "seed": 11, "max_tokens": 40, **CASES[case]}


Served = Cluster | Colocated
Pairs = dict[str, tuple[Any, Any]]
"""By case: what the disaggregated cluster answered, and the colocated worker."""


@pytest.fixture(scope="module")
def both(cluster: Cluster, colocated: Colocated) -> tuple[Served, Served]:
    """With the prompt's pages cached, which makes cached_tokens comparable."""
    both: tuple[Served, Served] = (cluster, colocated)
    for served in both:
        served.client.ok("/v1/chat/completions", chat_body("one token"))
        served.client.ok("/v1/chat/completions", chat_body("one token") | {"tools": TOOLS["tools"]})
    return both


@pytest.fixture(scope="module")
def chats(both: tuple[Served, Served]) -> Pairs:
    """All cases at once: whatever company a request has, it gets the same answer."""
    bodies = [chat_body(case) for case in CASES]
    ours, theirs = (served.client.post_all("/v1/chat/completions", bodies) for served in both)
    return dict(zip(CASES, zip(ours, theirs, strict=True), strict=True))


@pytest.fixture(scope="module")
def streamed_chats(both: tuple[Served, Served]) -> Pairs:
    async def events(client: Client, body: dict[str, Any]) -> list[Any]:
        async with client.stream("/v1/chat/completions", body) as stream:
            return [event async for event in stream]

    async def all_events(client: Client) -> list[list[Any]]:
        usage = {"stream_options": {"include_usage": True}}
        return await asyncio.gather(*(events(client, chat_body(case) | usage) for case in CASES))

    ours, theirs = (asyncio.run(all_events(served.client)) for served in both)
    return dict(zip(CASES, zip(ours, theirs, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_chat(chats: Pairs, case: str) -> None:
    (status, answer), theirs = chats[case]
    assert status == 200, answer
    same((status, answer), theirs)
    message = answer["choices"][0]["message"]
    assert message["content"] or message.get("tool_calls") or case == "stop token"


def test_forced_calls_keep_their_schema(chats: Pairs) -> None:
    for case, reason in (("required call", "tool_calls"), ("named call", "stop")):
        (choice,) = chats[case][0][1]["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == (reason, None)
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "ring":
            assert (case, arguments) == ("required call", {})
        else:
            types = {name: type(value) for name, value in arguments.items()}
            assert types == {"lighthouse": str, "night": bool}
            assert len(arguments["lighthouse"]) <= 20


@pytest.mark.parametrize("case", CASES)
def test_streamed_chat_carries_the_same(chats: Pairs, streamed_chats: Pairs, case: str) -> None:
    def reassembled(events: list[Any]) -> dict[int, dict[str, Any]]:
        choices: dict[int, dict[str, Any]] = {}
        for event in events:
            for part in event["choices"]:
                choice = choices.setdefault(
                    part["index"], {"text": "", "finish": None, "logprobs": [], "calls": {}}
                )
                choice["text"] += part["delta"].get("content") or ""
                for piece in part["delta"].get("tool_calls", ()):
                    call = choice["calls"].setdefault(piece["index"], {"name": "", "arguments": ""})
                    for key, more in piece["function"].items():
                        call[key] += more
                choice["finish"] = part["finish_reason"] or choice["finish"]
                if part.get("logprobs"):
                    choice["logprobs"] += part["logprobs"]["content"]
        return choices

    ours, theirs = streamed_chats[case]
    assert (ours.pop(), theirs.pop()) == ("[DONE]", "[DONE]")
    same(reassembled(ours), reassembled(theirs))
    same(ours[-1]["usage"], theirs[-1]["usage"])
    (status, whole), _ = chats[case]
    assert status == 200, whole
    assert reassembled(ours).keys() == {choice["index"] for choice in whole["choices"]}
    for choice in whole["choices"]:
        streamed, message = reassembled(ours)[choice["index"]], choice["message"]
        assert streamed["text"] == (message["content"] or "")
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert list(streamed["calls"].values()) == calls
        assert streamed["finish"] == choice["finish_reason"]


COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "The lighthouse keeper"},
    "token ids": {"prompt": [504, 2365, 282, 253]},
    "batch": {"prompt": ["The sea", "A ship", "The harbour at night"]},
    "batch of token ids": {"prompt": [[504, 2365], [253, 4512, 282]]},
    "batch and samples": {"prompt": ["The sea", "A ship"], "n": 2, "temperature": 1.0},
    "logprobs": {"prompt": "The lighthouse keeper", "logprobs": 3},
    "echo": {"prompt": "The lighthouse keeper", "echo": True},
    "echo with logprobs": {"prompt": "The lighthouse keeper", "echo": True, "logprobs": 2},
    "scored prompt": {"prompt": "The lighthouse keeper", "echo": True, "logprobs": 1, "max_tokens": 0},
    "scored long prompt": {
        "prompt": "The lighthouse keeper " * 200,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
    },
}


@pytest.mark.parametrize("case", COMPLETIONS)
def test_completions(cluster: Cluster, colocated: Colocated, case: str) -> None:
    cluster.flush()
    colocated.client.ok("/flush_cache", {})
    body = {
        "model": MODEL,
        "seed": 5,
        "max_tokens": 12,
        "temperature": 0,
        **COMPLETIONS[case],
    }
    answer = cluster.client.ok("/v1/completions", body)
    same(answer, colocated.client.ok("/v1/completions", body))
    prompts = COMPLETIONS[case]["prompt"]
    batch = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
    assert len(answer["choices"]) == batch * COMPLETIONS[case].get("n", 1)


NATIVE: dict[str, dict[str, Any]] = {
    "text": {"text": "The lighthouse keeper"},
    "ids": {"input_ids": [504, 2365, 282, 253]},
    "batch": {"text": ["The sea", "A ship"]},
    "samples": {"text": "The sea", "sampling_params": {"n": 3, "temperature": 1.0}},
    "logprobs": {"text": "The sea", "return_logprob": True, "top_logprobs_num": 2},
    "prompt logprobs": {"text": "The sea is wide", "return_logprob": True, "logprob_start_len": 0},
}


@pytest.mark.parametrize("case", NATIVE)
def test_generate(cluster: Cluster, colocated: Colocated, case: str) -> None:
    cluster.flush()
    colocated.client.ok("/flush_cache", {})
    sampling = {
        "max_new_tokens": 12,
        "temperature": 0,
        "sampling_seed": 3,
        **NATIVE[case].get("sampling_params", {}),
    }
    body = {**NATIVE[case], "sampling_params": sampling}
    same(cluster.client.ok("/generate", body), colocated.client.ok("/generate", body))


def test_a_seed_draws_the_same_in_a_crowd(cluster: Cluster) -> None:
    def body(seed: int) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": "Once upon a time",
            "seed": seed,
            "max_tokens": 24,
        }

    alone = cluster.client.ok("/v1/completions", body(7))["choices"][0]["text"]
    crowd = cluster.client.post_all("/v1/completions", [body(seed) for seed in range(12)], stagger=0.02)
    texts = [answer["choices"][0]["text"] for _, answer in crowd]
    assert texts[7] == alone
    assert len(set(texts)) > 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": []},
        {"messages": CHAT, "max_tokens": -1},
        {"messages": CHAT, "max_tokens": 10**9},
        {"messages": CHAT, "temperature": -0.1},
        {"messages": CHAT, "model": "nobody/knows-it"},
        {"messages": [{"role": "user", "content": "long " * 9000}]},
    ],
    ids=["empty", "negative", "huge", "temperature", "model", "too long"],
)
def test_errors(cluster: Cluster, colocated: Colocated, wrong: dict[str, Any]) -> None:
    body = {"model": MODEL, **wrong}
    ours, theirs = (c.client.post("/v1/chat/completions", body) for c in (cluster, colocated))
    assert 400 <= ours[0] < 500
    same(ours, theirs)
