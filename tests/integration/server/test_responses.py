"""`/v1/responses`: OpenAI's newer shape over the same samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import groupby

import aiohttp
import pytest

from .conftest import Client, Worker, say

ROUTE = "/v1/responses"
CHAT = "/v1/chat/completions"
TEXT = "Paris, naïve 世界 😀 — done."
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def asked(text: str = TEXT, /, **fields: object) -> dict[str, object]:
    script = fields.pop("script", {})
    return {"input": say(text, **script), **fields}


async def events(client: Client, body: dict) -> list[dict]:
    """Each with its name before it, numbered from 0."""
    async with client.session.post(client.url + ROUTE, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        frames = (await response.read()).decode().split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        found.append(event)
    return found


def unlike(response: dict) -> dict:
    """What two answers to one request may differ in, left out."""
    output = [{**item, "id": None} for item in response["output"]]
    return {**response, "id": None, "created_at": None, "completed_at": None, "output": output}


async def test_an_answer_has_openais_shape(client: Client):
    status, answer = await client.post(
        ROUTE, asked(metadata={"a": "b"}, temperature=0.5, script={"cached": 3})
    )
    assert status == 200
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    assert answer["id"].startswith("resp_")
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    assert (answer["metadata"], answer["temperature"], answer["top_p"]) == ({"a": "b"}, 0.5, 1.0)
    assert (answer["store"], answer["tools"], answer["incomplete_details"]) == (False, [], None)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 3


async def test_a_message_list_is_the_same_prompt_as_in_chat(client: Client):
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello to you."},
        {"role": "user", "content": say(TEXT)},
    ]
    await client.post(CHAT, {"messages": chat, "seed": 1})
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello to you.", "annotations": []}],
        },
        {"role": "user", "content": say(TEXT)},
    ]
    await client.post(ROUTE, {"instructions": "Be kind.", "input": given, "seed": 1})
    first, second = [message for message in await client.received() if message["type"] == "generate"][-2:]
    assert first["prompt_ids"] == second["prompt_ids"]
    assert first["sampling"] == second["sampling"]


async def test_events_come_in_the_documented_order_and_add_up_to_the_answer(client: Client):
    body = asked(**LOGPROBS, script={"delay": 0.01})
    _, whole = await client.post(ROUTE, body)
    stream = await events(client, body)
    kinds = [event["type"].removeprefix("response.") for event in stream]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    deltas = stream[4:-4]
    assert {event["type"] for event in deltas} == {"response.output_text.delta"}
    assert len(deltas) > 1
    done, part, item, completed = stream[-4:]
    assert "".join(event["delta"] for event in deltas) == done["text"] == part["part"]["text"] == TEXT
    logprobs = [entry for event in deltas for entry in event["logprobs"]]
    assert logprobs == done["logprobs"] == part["part"]["logprobs"]
    assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}
    assert completed["response"]["output"] == [item["item"]]
    assert unlike(completed["response"]) == unlike(whole)
    assert stream[0]["response"]["status"] == stream[1]["response"]["status"] == "in_progress"
    assert {event["response"]["id"] for event in stream if "response" in event} == {
        completed["response"]["id"]
    }
    ids = {event["item_id"] for event in stream if "item_id" in event}
    assert ids == {stream[2]["item"]["id"]} == {item["item"]["id"]}


async def test_thinking_is_an_item_of_its_own(
    make_worker: Callable[..., Worker], session: aiohttp.ClientSession
):
    client = Client(make_worker("colocated", "--reasoning-parser", "qwen3").url, session)
    body = asked("<think>\nhmm, well\n</think>\n\nYes, 世界.", script={"delay": 0.005}, **LOGPROBS)
    _, whole = await client.post(ROUTE, body)
    thought, message = whole["output"]
    assert (thought["type"], thought["status"], thought["summary"]) == ("reasoning", "completed", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "hmm, well"}]
    assert message["content"][0]["text"] == "Yes, 世界."
    tokens = "".join(
        bytes(entry["bytes"]).decode("utf-8", "replace") for entry in message["content"][0]["logprobs"]
    )
    assert tokens.startswith("\n\nYes")
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"]
    stream = await events(client, body)
    assert unlike(stream[-1]["response"]) == unlike(whole)
    kinds = [event["type"].removeprefix("response.") for event in stream]
    assert [kind for kind, _ in groupby(kinds)] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    for item in (0, 1):
        mine = [event for event in stream if event.get("output_index") == item]
        text = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert text == whole["output"][item]["content"][0]["text"]
    # An answer may go back into the next request as it is.
    conversation = [{"role": "user", "content": "Is it?"}, *whole["output"]]
    again = [*conversation, {"role": "user", "content": say("Yes.")}]
    assert (await client.post(ROUTE, {"input": again}))[0] == 200


async def test_the_token_limit_makes_an_answer_incomplete(client: Client):
    body = asked("a b c", ignore_eos=True, max_output_tokens=16)
    _, answer = await client.post(ROUTE, body)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["usage"]["output_tokens"] == 16
    last = (await events(client, body))[-1]
    assert last["type"] == "response.incomplete"
    assert unlike(last["response"]) == unlike(answer)


async def test_an_error_in_mid_stream_fails_the_response(client: Client):
    error = {"status": 502, "message": "the prefill worker is gone"}
    body = asked("one two three", script={"after": 2, "delay": 0.05, "error": error})
    *_, last = await events(client, body)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["message"] == "the prefill worker is gone"


async def test_an_error_before_any_output_is_an_http_status(client: Client):
    body = asked(script={"error": {"status": 502, "message": "no"}}, stream=True)
    assert (await client.post(ROUTE, body))[0] == 502


async def test_an_aborted_response_is_cancelled(client: Client):
    body = asked(script={"hang": True, "after": 1}, rid="resp-abort-me")
    request = client.session.post(client.url + ROUTE, json=body)
    async with aiohttp.ClientSession() as other:
        answer = asyncio.ensure_future(request)
        await client.until_running(1)
        await Client(client.url, other).post("/abort_request", {"rid": "resp-abort-me"})
        response = await (await answer).json()
    assert (response["status"], response["output"][0]["status"]) == ("cancelled", "incomplete")


async def test_sampling_fields_of_other_servers_reach_the_scheduler(client: Client):
    await client.post(ROUTE, asked(top_k=7, seed=5, min_p=0.25, stop_token_ids=[9], max_output_tokens=20))
    sampling = (await client.received())[-1]["sampling"]
    assert (sampling["top_k"], sampling["seed"], sampling["min_p"]) == (7, 5, 0.25)
    assert (sampling["stop_token_ids"], sampling["max_new_tokens"]) == ([9], 20)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def test_a_text_format_is_the_grammar_that_chat_would_ask_for(client: Client):
    chat_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    await client.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "response_format": chat_format})
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    _, answer = await client.post(ROUTE, asked(text={"format": form}))
    assert answer["text"]["format"] == form
    generates = [message for message in await client.received() if message["type"] == "generate"]
    first, second = (message["sampling"]["grammar"] for message in generates[-2:])
    assert first["kind"] == second["kind"] == "json_schema"
    assert first["text"] == second["text"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"max_output_tokens": 15}, "max_output_tokens"),
        ({"max_tokens": 20}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["everything"]}, "include[0]"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(client: Client, fields: dict, param: str):
    status, answer = await client.post(ROUTE, {"input": "x", **fields})
    assert (status, answer["error"]["param"]) == (400, param)


async def test_fields_that_change_no_answer_are_accepted(client: Client):
    accepted = {
        "store": True,
        "user": "me",
        "service_tier": "flex",
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "truncation": "disabled",
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"summary": "auto"},
        "stream_options": {"include_obfuscation": False},
    }
    status, answer = await client.post(ROUTE, asked(**accepted))
    assert (status, answer["output"][0]["content"][0]["text"]) == (200, TEXT)
    assert answer["store"] is False


async def test_half_a_pair_needs_a_room(prefill: Worker, decode: Worker, session: aiohttp.ClientSession):
    body = asked(bootstrap_host="h", bootstrap_room=77)
    for worker in (prefill, decode):
        client = Client(worker.url, session)
        status, answer = await client.post(ROUTE, {"input": "x"})
        assert (status, answer["error"]["param"]) == (400, "bootstrap_room")
        assert (await client.post(ROUTE, body))[0] == 200
        assert (await client.received())[-1]["room"] == 77
