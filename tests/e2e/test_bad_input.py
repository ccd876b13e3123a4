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

# Route, body, the field that the error must name (None: the body as a whole). What one field can be refused
# for is in the conformance table.
CASES: dict[str, tuple[str, Any, str | None]] = {
    "nesting": ("/v1/completions", b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", None),
    "prompt over the context": ("/v1/completions", TEXT | {"prompt": "word " * 9000}, "prompt"),
    "prompt of megabytes": ("/v1/completions", TEXT | {"prompt": "a b " * 1_500_000}, "prompt"),
    "prompt over the pool": ("/v1/completions", TEXT | {"prompt": "word " * 5000}, "prompt"),
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
