"""Bad input gets a 4xx in OpenAI's error shape that names the field; the workers go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support.cluster import MODEL, Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster("--max-total-tokens", "4096")
    yield cluster
    cluster.close()


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TEXT = {"model": MODEL, "prompt": "Hi", "max_tokens": 4}

# Route, body, the field that the error must name (None: the body as a whole).
CASES: dict[str, tuple[str, Any, str | None]] = {
    "not json": ("/v1/chat/completions", b"{not json", None),
    "empty body": ("/v1/chat/completions", b"", None),
    "a list": ("/v1/completions", b"[1, 2]", None),
    "invalid utf-8": ("/v1/completions", b'{"prompt": "\xff\xfe"}', None),
    "nesting": ("/v1/completions", b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", None),
    "messages missing": ("/v1/chat/completions", {"model": MODEL}, "messages"),
    "messages empty": ("/v1/chat/completions", CHAT | {"messages": []}, "messages"),
    "messages a string": ("/v1/chat/completions", CHAT | {"messages": "hi"}, "messages"),
    "unknown role": ("/v1/chat/completions", CHAT | {"messages": [{"role": "x", "content": ""}]}, "messages"),
    "temperature a string": ("/v1/chat/completions", CHAT | {"temperature": "hot"}, "temperature"),
    "temperature negative": ("/v1/chat/completions", CHAT | {"temperature": -1}, "temperature"),
    "temperature huge": ("/v1/chat/completions", CHAT | {"temperature": 1e300}, "temperature"),
    "top_p over one": ("/v1/chat/completions", CHAT | {"top_p": 1.5}, "top_p"),
    "max_tokens negative": ("/v1/chat/completions", CHAT | {"max_tokens": -5}, "max_tokens"),
    "max_tokens huge": ("/v1/chat/completions", CHAT | {"max_tokens": 10**30}, "max_tokens"),
    "max_tokens fractional": ("/v1/chat/completions", CHAT | {"max_tokens": 1.5}, "max_tokens"),
    "n zero": ("/v1/chat/completions", CHAT | {"n": 0}, "n"),
    "n huge": ("/v1/chat/completions", CHAT | {"n": 10**6}, "n"),
    "stop of numbers": ("/v1/chat/completions", CHAT | {"stop": [1, 2]}, "stop"),
    "logit_bias out of vocabulary": (
        "/v1/chat/completions",
        CHAT | {"logit_bias": {"999999": 1}},
        "logit_bias",
    ),
    "prompt empty": ("/v1/completions", TEXT | {"prompt": ""}, "prompt"),
    "prompt of no tokens": ("/v1/completions", TEXT | {"prompt": []}, "prompt"),
    "token id negative": ("/v1/completions", TEXT | {"prompt": [5, -1]}, "prompt"),
    "token id too big": ("/v1/completions", TEXT | {"prompt": [10**9]}, "prompt"),
    "prompt over the context": ("/v1/completions", TEXT | {"prompt": "word " * 9000}, "prompt"),
    "prompt of megabytes": ("/v1/completions", TEXT | {"prompt": "a b " * 1_500_000}, "prompt"),
    "prompt over the pool": ("/v1/completions", TEXT | {"prompt": "word " * 5000}, "prompt"),
    "native without prompt": ("/generate", {"sampling_params": {}}, "text"),
    "native top_k": ("/generate", {"text": "a", "sampling_params": {"top_k": "x"}}, "sampling_params"),
    "suffix": ("/v1/completions", TEXT | {"suffix": "x"}, "suffix"),
    "tools": ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, "tools"),
}


@pytest.mark.parametrize("case", CASES)
def test_is_refused_by_name(cluster: Cluster, case: str) -> None:
    route, body, field = CASES[case]
    status, answer = cluster.client.post(route, body)
    assert 400 <= status < 500, answer
    error = answer["error"]
    assert error["message"]
    assert error["type"]
    if field is not None:
        assert (error["param"] or "").startswith(field), error
    assert cluster.client.ok("/v1/completions", TEXT)["usage"]["completion_tokens"] > 0


def test_a_body_of_50_megabytes_is_refused(cluster: Cluster) -> None:
    status, answer = cluster.client.post("/v1/completions", b'{"prompt": "' + b"x" * (50 << 20) + b'"}')
    assert status == 413
    assert "bytes" in answer["error"]["message"]
    assert cluster.client.ok("/v1/completions", TEXT)["choices"]


def test_unknown_model_and_unknown_route_are_404(cluster: Cluster) -> None:
    status, answer = cluster.client.post("/v1/chat/completions", CHAT | {"model": "nobody/has-it"})
    assert (status, answer["error"]["param"]) == (404, "model")
    status, answer = cluster.client.post("/v1/nothing", {})
    assert status == 404
    assert answer["error"]["message"]


def test_a_room_given_twice_is_refused(cluster: Cluster) -> None:
    body = {"text": ["a", "b"], "bootstrap_host": "127.0.0.1", "bootstrap_room": [7, 7]}
    for worker in cluster.workers:
        status, answer = worker.client.post("/generate", body)
        assert (status, answer["error"]["param"]) == (400, "bootstrap_room")


def test_a_room_that_is_active_refuses_a_second_request_and_serves_the_first(cluster: Cluster) -> None:
    """Straight to the workers, as another router would."""
    body = {
        "input_ids": list(range(100, 140)),
        "sampling_params": {"max_new_tokens": 40, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": int(cluster.prefill.launched.bootstrap_port),
        "bootstrap_room": 4711,
    }

    async def three() -> list[tuple[int, Any]]:
        decode, prefill = cluster.decode.client, cluster.prefill.client
        first = asyncio.create_task(decode.request("POST", "/generate", body))
        waiting = 0
        while not waiting:
            waiting = (await decode.request("GET", "/server_info"))[1]["load"]["num_waiting_reqs"]
        # The decode side of the room waits for its prefill: a second one must not join or harm it.
        second = await decode.request("POST", "/generate", body)
        third = await prefill.request("POST", "/generate", body)
        return [await first, second, third]

    first, second, third = asyncio.run(three())
    assert (second[0], second[1]["error"]["param"]) == (400, "bootstrap_room")
    assert third[0] == 200
    assert (first[0], first[1]["meta_info"]["completion_tokens"]) == (200, 40)
    cluster.wait_until_idle()
