from __future__ import annotations

import asyncio
import json
import socket
import time

import aiohttp
import pytest

from .conftest import Client, Worker, chat, say, wait_until

CHAT = "/v1/chat/completions"
SLOW = {"delay": 0.05}
LONG = "word " * 400


async def aborts(client: Client) -> list[dict]:
    return [message for message in await client.received() if message["type"] == "abort"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_every_sample_at_once(client: Client, stream: bool):
    before = len(await aborts(client))
    body = json.dumps(chat(LONG, script=SLOW, n=3, stream=stream)).encode()
    host, port = client.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    await client.until_running(3)
    connection.close()
    await client.until_running(0, 1.0)
    new = (await aborts(client))[before:]
    assert len({message["rid"] for message in new}) == 3
    assert all(message["quiet"] for message in new)


async def test_a_client_that_leaves_is_counted_not_logged(client: Client, colocated: Worker):
    with pytest.raises(asyncio.TimeoutError):
        await client.post(CHAT, chat(LONG, script=SLOW), timeout=aiohttp.ClientTimeout(total=0.2))
    await client.until_running(0)
    async with client.session.get(client.url + "/metrics") as response:
        text = await response.text()
    assert f'diptych_http_requests_total{{route="{CHAT}",status="499"}}' in text
    assert colocated.stderr == ""


@pytest.mark.parametrize("by", ["rid", "all"])
async def test_abort_request_ends_with_finish_reason_abort(client: Client, by: str):
    task = asyncio.create_task(client.post(CHAT, chat(LONG, script=SLOW, n=2, rid=f"to-abort-{by}")))
    await client.until_running(2)
    await client.post("/abort_request", {"rid": "somebody else"})
    assert await client.running() == 2
    status, answer = await client.post(
        "/abort_request", {"rid": "to-abort-rid"} if by == "rid" else {"abort_all": True}
    )
    assert (status, answer) == (200, {"aborted": 2})
    status, answer = await task
    assert status == 200
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]


async def test_one_prompt_of_a_native_batch_can_be_aborted(client: Client):
    prompts = [say(LONG, **SLOW), say("short")]
    task = asyncio.create_task(client.post("/generate", {"text": prompts, "rid": ["one", "two"]}))
    await client.until_running(1)
    await client.post("/abort_request", {"rid": "one"})
    _, (first, second) = await task
    assert first["meta_info"]["finish_reason"]["type"] == "abort"
    assert second["text"] == "short"


async def test_an_id_in_use_is_refused_and_the_first_request_goes_on(client: Client):
    first = asyncio.create_task(client.post(CHAT, chat("one two", script={"delay": 0.1}, rid="twice")))
    await client.until_running(1)
    status, answer = await client.post(CHAT, chat("x", rid="twice"))
    assert (status, answer["error"]["param"]) == (400, "rid")
    assert (await first)[1]["choices"][0]["message"]["content"] == "one two"
    status, _ = await client.post(CHAT, chat("x", rid="twice"))
    assert status == 200


async def test_an_engine_error_before_the_first_byte_is_a_status(client: Client):
    error = {"status": 400, "message": "the prompt is odd", "param": "prompt"}
    for stream in (False, True):
        status, answer = await client.post(CHAT, chat(script={"error": error}, stream=stream))
        assert status == 400
        assert (answer["error"]["message"], answer["error"]["param"]) == ("the prompt is odd", "prompt")


async def test_an_engine_error_in_a_stream_is_an_event(client: Client):
    error = {"status": 503, "message": "out of pages"}
    events = await client.events(CHAT, chat("one two three", script={"error": error, "after": 2, **SLOW}))
    assert events[-1]["error"]["message"] == "out of pages"
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_one_failed_sample_fails_the_request_and_stops_the_others(client: Client):
    prompts = [say(LONG, **SLOW), say(error={"status": 500, "message": "broken"})]
    started = time.monotonic()
    status, answer = await client.post("/v1/completions", {"prompt": prompts})
    assert (status, answer["error"]["message"]) == (500, "broken")
    assert time.monotonic() - started < 5
    await client.until_running(0)


async def test_many_requests_at_once_get_their_own_answers(client: Client):
    texts = [f"answer number {k} of many" for k in range(40)]
    answers = await asyncio.gather(
        *(client.post(CHAT, chat(text, script={"delay": 0.002}, stream=False)) for text in texts)
    )
    assert [answer["choices"][0]["message"]["content"] for _, answer in answers] == texts


def test_kill_of_the_frontend_leaves_no_scheduler(make_worker):
    import signal

    worker = make_worker("colocated")
    scheduler = worker.scheduler
    worker.signal(signal.SIGKILL)
    assert wait_until(lambda: not scheduler.is_running())
