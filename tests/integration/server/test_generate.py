from __future__ import annotations

from .conftest import Client, say

ROUTE = "/generate"


async def test_an_answer_has_the_native_shape(client: Client):
    status, answer = await client.post(ROUTE, {"text": say("Hello you", cached=2), "rid": "my-id"})
    assert status == 200
    meta = answer["meta_info"]
    assert answer["text"] == "Hello you"
    assert answer["output_ids"][-1] == 2
    assert meta["id"] == "my-id"
    assert meta["finish_reason"] == {"type": "stop", "matched": 2}
    assert meta["completion_tokens"] == len(answer["output_ids"])
    assert meta["cached_tokens"] == 2
    assert "output_token_logprobs" not in meta


async def test_length_and_stop_strings_are_finish_reasons(client: Client):
    _, answer = await client.post(
        ROUTE, {"text": say("one two three"), "sampling_params": {"max_new_tokens": 2}}
    )
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    _, answer = await client.post(
        ROUTE, {"text": say("one two three"), "sampling_params": {"stop": [" two"]}}
    )
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": " two"}
    assert answer["text"] == "one"


async def test_batches_and_n_answer_with_lists(client: Client):
    _, answers = await client.post(
        ROUTE,
        {
            "text": [say("a"), say("b")],
            "sampling_params": [{"n": 2}, {"max_new_tokens": 1}],
            "rid": ["p", "q"],
        },
    )
    assert [(answer["text"], answer["meta_info"]["id"]) for answer in answers] == [
        ("a", "p"),
        ("a", "p"),
        ("b", "q"),
    ]
    _, one = await client.post(ROUTE, {"text": [say("a")]})
    assert [answer["text"] for answer in one] == ["a"]


async def test_ids_are_prompts(client: Client):
    ids = (await client.post("/tokenize", {"prompt": say("by ids")}))[1]["tokens"]
    assert (await client.post(ROUTE, {"input_ids": ids}))[1]["text"] == "by ids"
    assert [a["text"] for a in (await client.post(ROUTE, {"input_ids": [ids, ids]}))[1]] == ["by ids"] * 2


async def test_streams_are_cumulative(client: Client):
    events = await client.events(ROUTE, {"text": say("one two three", delay=0.02)})
    assert [event["text"] for event in events][:3] == ["one", "one two", "one two three"]
    assert all(a["meta_info"]["finish_reason"] is None for a in events[:-1])
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert len(events[-1]["output_ids"]) == 4


async def test_streamed_batches_carry_an_index(client: Client):
    events = await client.events(ROUTE, {"text": [say("a"), say("b")]})
    last = {event["index"]: event["text"] for event in events}
    assert last == {0: "a", 1: "b"}


async def test_logprobs_of_prompt_and_output(client: Client):
    body = {"text": say("Hi there"), "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    _, answer = await client.post(ROUTE, body)
    meta = answer["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_top_logprobs"][0] is None
    assert len(meta["input_top_logprobs"][1]) == 2
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert [entry[0] for entry in meta["output_token_logprobs"]] == [-0.25, -0.5, -0.75]
    assert meta["output_token_logprobs"][0][2] is None
    _, part = await client.post(ROUTE, body | {"logprob_start_len": 3, "return_text_in_logprobs": True})
    assert [entry[:2] for entry in part["meta_info"]["input_token_logprobs"]] == [
        entry[:2] for entry in meta["input_token_logprobs"][3:]
    ]
    assert "".join(entry[2] for entry in part["meta_info"]["output_token_logprobs"]) == "Hi there<|im_end|>"


async def test_without_a_start_no_prompt_logprobs_are_computed(client: Client):
    _, answer = await client.post(ROUTE, {"text": say("Hi"), "return_logprob": True})
    assert answer["meta_info"]["input_token_logprobs"] == []
    assert "prompt_logprobs" not in (await client.received())[-1]["sampling"]
