from __future__ import annotations

import socket

import aiohttp
import pytest

from .conftest import Client, Worker, chat, say

ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9, "bootstrap_room": 12345}
HI = [{"role": "user", "content": "Hi"}]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NATIVE = "/generate"

CASES = [
    (CHAT, b"{not json", 400, None),
    (CHAT, b'{"messages": "\xff"}', 400, None),
    (CHAT, b"", 400, None),
    (CHAT, b"[1, 2]", 400, None),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "nobody", "content": ""}]}, 400, "messages[0].role"),
    (CHAT, {"messages": HI, "model": "gpt-9"}, 404, "model"),
    (CHAT, {"messages": HI, "max_tokens": -1}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 8192}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": 10**40}, 400, "max_completion_tokens"),
    (CHAT, {"messages": HI, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": HI, "temperature": "hot"}, 400, "temperature"),
    (CHAT, {"messages": HI, "n": 0}, 400, "n"),
    (CHAT, {"messages": HI, "n": 10**9}, 400, "n"),
    (CHAT, {"messages": HI, "top_logprobs": 3}, 400, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {"messages": HI, "stop": ["", "a"]}, 400, "stop"),
    (CHAT, {"messages": HI, "seed": -4}, 400, "seed"),
    (
        NATIVE,
        {"text": "Hi", "sampling_params": {"sampling_seed": -4}},
        400,
        "sampling_params.sampling_seed",
    ),
    (CHAT, {"messages": HI, "logit_bias": {"99999999": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "stream_options": 5}, 400, "stream_options"),
    (CHAT, {"messages": HI, "rid": ""}, 400, "rid"),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "top_p": NaN}', 400, None),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "top_p": 1e999}', 400, "top_p"),
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [[]]}, 400, "prompt[0]"),
    (TEXT, {"prompt": ["x", 5]}, 400, "prompt"),
    (TEXT, {"prompt": [49152]}, 400, "prompt"),
    (TEXT, {"prompt": [[1], [-1]]}, 400, "prompt[1]"),
    (TEXT, {"prompt": [1] * 8193}, 400, "prompt"),
    (TEXT, {"prompt": [1] * 8192, "max_tokens": 1}, 400, "prompt"),
    (TEXT, {"prompt": "x", "logprobs": 99}, 400, "logprobs"),
    (TEXT, {"prompt": "x", "n": 5, "best_of": 2}, 400, "best_of"),
    (TEXT, {"prompt": "x", "min_tokens": 5, "max_tokens": 4}, 400, "min_tokens"),
    (NATIVE, {}, 400, "text"),
    (NATIVE, {"text": "x", "input_ids": [1]}, 400, "text"),
    (NATIVE, {"input_ids": []}, 400, "input_ids"),
    (NATIVE, {"text": "x", "sampling_params": {"max_new_tokens": -5}}, 400, "sampling_params.max_new_tokens"),
    (NATIVE, {"text": "x", "sampling_params": {"regex": ""}}, 400, "sampling_params.regex"),
    (NATIVE, {"text": "x", "sampling_params": [{}, {}]}, 400, "sampling_params"),
    (NATIVE, {"text": "x", "logprob_start_len": 99}, 400, "logprob_start_len"),
    (NATIVE, {"text": ["x", "y"], "rid": ["a", "a"]}, 400, "rid"),
]


def _with_room(body: object) -> object:
    return {**body, **ROOM} if isinstance(body, dict) else body


@pytest.mark.parametrize(("path", "body", "status", "param"), CASES)
async def test_bad_input_gets_the_same_4xx_on_every_kind_of_worker(
    colocated: Worker,
    prefill: Worker,
    decode: Worker,
    session: aiohttp.ClientSession,
    path: str,
    body: object,
    status: int,
    param: str | None,
):
    answers = [
        await Client(worker.url, session).post(path, _with_room(body))
        for worker in (colocated, prefill, decode)
    ]
    assert answers[0] == answers[1] == answers[2]
    got, answer = answers[0]
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param
    assert answer["error"]["message"]


async def test_nothing_bad_reaches_the_scheduler(client: Client):
    before = len(await client.received())
    for path, body, _, _ in CASES:
        await client.post(path, body)
    assert len(await client.received()) == before


@pytest.mark.parametrize("announced", [True, False])
async def test_a_huge_body_gets_a_413_and_the_worker_goes_on(client: Client, announced: bool):
    body = b'{"prompt": "' + b"x" * (50 << 20) + b'"}'

    async def in_pieces():
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    data = body if announced else in_pieces()
    async with client.session.post(client.url + TEXT, data=data) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"
    status, _ = await client.post(CHAT, chat("fine"))
    assert status == 200


async def test_unknown_routes_and_methods_have_the_error_shape(client: Client):
    status, answer = await client.get("/v1/embeddings")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    status, answer = await client.get(CHAT)
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


async def test_an_unknown_model_is_model_not_found(client: Client):
    _, answer = await client.post(CHAT, {"messages": HI, "model": "other"})
    assert answer["error"]["code"] == "model_not_found"


async def test_the_context_is_named_when_it_is_too_short(client: Client):
    _, answer = await client.post(TEXT, {"prompt": [1] * 8000, "max_tokens": 200})
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "8000" in answer["error"]["message"]
    assert "8192" in answer["error"]["message"]


def _raw(worker: Worker, data: bytes) -> bytes:
    host, port = worker.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(data)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ],
)
def test_other_protocols_and_broken_http_are_refused_quietly(colocated: Worker, data: bytes):
    before = colocated.stderr
    assert b" 400 " in _raw(colocated, data)
    # The session's fixture also checks at the end that the log stayed empty.
    assert colocated.stderr == before


async def test_a_stop_string_list_longer_than_openais_works(client: Client):
    stops = [f"never{k}" for k in range(16)]
    status, answer = await client.post(TEXT, {"prompt": say("fine"), "stop": stops})
    assert (status, answer["choices"][0]["text"]) == (200, "fine")
