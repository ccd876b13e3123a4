from __future__ import annotations

import time

import aiohttp
import pytest

from diptych.server.rooms import derive_room

from .conftest import Client, Worker, chat, say

CHAT = "/v1/chat/completions"
PAIR = {"bootstrap_host": "10.0.0.7", "bootstrap_port": None}


@pytest.fixture
def pair(prefill: Worker, decode: Worker, session: aiohttp.ClientSession) -> tuple[Client, Client]:
    return Client(prefill.url, session), Client(decode.url, session)


async def sent(client: Client, count: int) -> list[dict]:
    return [message for message in await client.received() if message["type"] == "generate"][-count:]


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat("x")), ("/v1/completions", {"prompt": "x"}), ("/generate", {"text": "x"})]
)
async def test_without_a_room_half_a_pair_refuses(pair: tuple[Client, Client], path: str, body: dict):
    for client in pair:
        status, answer = await client.post(path, body)
        assert (status, answer["error"]["param"]) == (400, "bootstrap_room")
        assert "router" in answer["error"]["message"]


async def test_decode_needs_to_know_its_prefill(pair: tuple[Client, Client]):
    _, decode = pair
    status, answer = await decode.post(CHAT, chat("x", bootstrap_room=5))
    assert (status, answer["error"]["param"]) == (400, "bootstrap_host")


async def test_the_room_of_a_single_sample_is_the_one_given(pair: tuple[Client, Client]):
    body = chat("x", **PAIR, bootstrap_room=2**63 - 1)
    for client in pair:
        assert (await client.post(CHAT, body))[0] == 200
        (message,) = await sent(client, 1)
        assert (message["room"], message["bootstrap_host"]) == (2**63 - 1, "10.0.0.7")


async def test_a_null_port_is_the_default_one(pair: tuple[Client, Client]):
    _, decode = pair
    await decode.post(CHAT, chat("x", **PAIR, bootstrap_room=6))
    assert (await sent(decode, 1))[0]["bootstrap_port"] == 8998
    await decode.post(CHAT, chat("x", bootstrap_host="h", bootstrap_port=77, bootstrap_room=6))
    assert (await sent(decode, 1))[0]["bootstrap_port"] == 77


async def test_both_sides_derive_the_same_rooms_when_fewer_come_than_samples(pair: tuple[Client, Client]):
    body = {"prompt": [say("a"), say("b")], "n": 2, **PAIR, "bootstrap_room": [100, 200]}
    rooms = []
    for client in pair:
        assert (await client.post("/v1/completions", body))[0] == 200
        rooms.append([message["room"] for message in await sent(client, 4)])
    assert rooms[0] == rooms[1] == [100, derive_room(100, 1), 200, derive_room(200, 1)]


async def test_lists_are_taken_sample_by_sample(pair: tuple[Client, Client]):
    body = {
        "text": [say("a"), say("b")],
        "bootstrap_host": ["h1", "h2"],
        "bootstrap_port": [1, None],
        "bootstrap_room": [31, 32],
    }
    _, decode = pair
    assert (await decode.post("/generate", body))[0] == 200
    pairs = [(m["room"], m["bootstrap_host"], m["bootstrap_port"]) for m in await sent(decode, 2)]
    assert pairs == [(31, "h1", 1), (32, "h2", 8998)]


@pytest.mark.parametrize("rooms", [[4, 4], [1, 2, 3], -1, 2**63, []])
async def test_unusable_rooms_are_refused_alike(pair: tuple[Client, Client], rooms: object):
    body = {"prompt": ["a", "b"], **PAIR, "bootstrap_room": rooms}
    answers = [await client.post("/v1/completions", body) for client in pair]
    assert answers[0] == answers[1]
    assert (answers[0][0], answers[0][1]["error"]["param"]) == (400, "bootstrap_room")


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_answers_when_the_pages_have_left(pair: tuple[Client, Client], stream: bool):
    prefill, _ = pair
    body = chat("one two three", script={"transfer": 0.3}, **PAIR, bootstrap_room=1)
    started = time.monotonic()
    if stream:
        chunks = await prefill.events(CHAT, body)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    else:
        text = (await prefill.post(CHAT, body))[1]["choices"][0]["message"]["content"]
    assert time.monotonic() - started > 0.3
    assert text == "one"


async def test_a_stop_string_in_the_first_token_does_not_stop_the_transfer(pair: tuple[Client, Client]):
    prefill, decode = pair
    body = chat("one two three", script={"transfer": 0.1}, **PAIR, bootstrap_room=1, stop="one")
    assert (await prefill.post(CHAT, body))[0] == 200
    assert (await prefill.received())[-1]["type"] == "generate"
    _, answer = await decode.post(CHAT, body)
    assert answer["choices"][0]["message"]["content"] == ""


async def test_a_prefill_that_fails_answers_with_the_status(pair: tuple[Client, Client]):
    prefill, _ = pair
    error = {"status": 502, "message": "the decode worker is gone"}
    body = chat(script={"error": error}, **PAIR, bootstrap_room=1, stream=True)
    status, answer = await prefill.post(CHAT, body)
    assert (status, answer["error"]["message"]) == (502, "the decode worker is gone")


async def test_decode_answers_the_prompt_logprobs_that_its_scheduler_was_handed(pair: tuple[Client, Client]):
    _, decode = pair
    body = {"prompt": say("z"), "echo": True, "logprobs": 1, **PAIR, "bootstrap_room": 9}
    _, answer = await decode.post("/v1/completions", body)
    prompt_tokens = answer["usage"]["prompt_tokens"]
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs[0] is None
    assert logprobs[1] == -0.25
    assert logprobs[prompt_tokens] == -0.25


async def test_the_bootstrap_service_is_up_beside_the_worker(prefill: Worker, session: aiohttp.ClientSession):
    port = int(prefill.ready_line.split("bootstrap=")[1])
    client = Client(f"http://127.0.0.1:{port}", session)
    status, answer = await client.get("/route")  # the scripted scheduler doesn't register
    assert (status, answer) == (503, {"error": "no rank has registered yet"})


async def test_a_colocated_worker_needs_no_room(client: Client):
    await client.post(CHAT, chat("x", **PAIR, bootstrap_room=5))
    (message,) = await sent(client, 1)
    assert message["room"] is None


async def test_without_fault_injection_nobody_can_ask_for_faults(pair: tuple[Client, Client]):
    for worker in pair:
        assert (await worker.get("/faults"))[0] == 404
        assert (await worker.post("/faults", {"release": True}))[0] == 404
