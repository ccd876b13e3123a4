from __future__ import annotations

import pytest

from .conftest import Client, chat

TEXT = "Paris, naïve 世界 😀 — done."
ROUTE = "/v1/chat/completions"


async def test_an_answer_has_openais_shape(client: Client):
    status, answer = await client.post(ROUTE, chat(TEXT, script={"cached": 3}, model="smollm2-135m-instruct"))
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_a_stream_says_the_same_as_the_whole_answer(client: Client):
    _, whole = await client.post(ROUTE, chat(TEXT))
    chunks = await client.events(ROUTE, chat(TEXT, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *chunks, last = chunks
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]


async def test_usage_is_only_streamed_when_asked_for(client: Client):
    chunks = await client.events(ROUTE, chat(TEXT))
    assert not any("usage" in chunk for chunk in chunks)


async def test_tokens_are_streamed_as_they_come(client: Client):
    chunks = await client.events(ROUTE, chat("one two three four", script={"delay": 0.1}))
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert [text for text in texts if text] == ["one", " two", " three", " four"]


async def test_n_samples_have_indices_and_seeds_of_their_own(client: Client):
    _, answer = await client.post(ROUTE, chat(TEXT, n=3, seed=11, user="n-test"))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    generates = [message for message in await client.received() if message["type"] == "generate"][-3:]
    seeds = [message["sampling"]["seed"] for message in generates]
    assert seeds[0] == 11
    assert len(set(seeds)) == 3
    one = await client.post(ROUTE, chat(TEXT))
    assert answer["usage"]["prompt_tokens"] == one[1]["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * one[1]["usage"]["completion_tokens"]


async def test_streams_of_several_samples_are_told_apart(client: Client):
    chunks = await client.events(ROUTE, chat(TEXT, n=2))
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == TEXT
        assert mine[-1]["finish_reason"] == "stop"


async def test_length_ends_an_answer(client: Client):
    for name in ("max_tokens", "max_completion_tokens"):
        _, answer = await client.post(ROUTE, chat(TEXT, **{name: 2}))
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 2


async def test_a_stop_string_never_shows_and_what_follows_does_not_count(client: Client):
    body = chat("one two three four five six", script={"delay": 0.01}, stop=["three f", "nowhere"])
    _, answer = await client.post(ROUTE, body)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "one two "
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "three f")
    assert answer["usage"]["completion_tokens"] == 4
    chunks = await client.events(ROUTE, body)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "one two "
    aborts = [message for message in await client.received() if message["type"] == "abort"]
    assert aborts[-1]["quiet"] is True


async def test_the_stop_string_stays_when_asked(client: Client):
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        _, answer = await client.post(ROUTE, chat("one two three", stop=" two", **{name: True}))
        assert answer["choices"][0]["message"]["content"] == "one two"


async def test_logprobs_line_up_with_the_text(client: Client):
    body = chat(TEXT, logprobs=True, top_logprobs=2)
    _, answer = await client.post(ROUTE, body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == TEXT + "<|im_end|>"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]
    assert [entry["logprob"] for entry in content[:3]] == [-0.25, -0.5, -0.75]
    streamed = []
    for chunk in await client.events(ROUTE, body):
        logprobs = chunk["choices"][0]["logprobs"]
        streamed += logprobs["content"] if logprobs else []
    assert [entry["logprob"] for entry in streamed] == [entry["logprob"] for entry in content]


async def test_every_sampling_field_reaches_the_scheduler(client: Client):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 99,
        "stop_token_ids": [7, 8],
        "ignore_eos": True,
        "logit_bias": {"5": -100},
    }
    status, _ = await client.post(ROUTE, chat(TEXT, max_tokens=3, min_tokens=1, **fields))
    assert status == 200
    sampling = (await client.received())[-1]["sampling"]
    assert sampling == fields | {
        "max_new_tokens": 3,
        "min_new_tokens": 1,
        "logit_bias": {"5": -100.0},
    }


async def test_fields_that_other_routers_add_are_accepted(client: Client):
    added = {
        "no_stop_trim": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "continue_final_message": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
    }
    status, answer = await client.post(ROUTE, chat(TEXT, **added))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, TEXT)


async def test_content_may_come_in_parts_and_developers_are_the_system(client: Client):
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    _, split = await client.post(ROUTE, {"messages": messages})
    joined = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first\nsecond"},
    ]
    _, whole = await client.post(ROUTE, {"messages": joined})
    prompts = [message["prompt_ids"] for message in (await client.received())[-2:]]
    assert prompts[0] == prompts[1]
    assert split["usage"] == whole["usage"]


@pytest.mark.parametrize("name", ["response_format", "functions", "audio"])
async def test_what_is_not_supported_is_refused_by_name(client: Client, name: str):
    status, answer = await client.post(ROUTE, chat(TEXT, **{name: [{"type": "json_object"}]}))
    assert (status, answer["error"]["param"]) == (400, name)


async def test_special_tokens_can_be_shown(client: Client):
    tokens = {"tokens": [1, 30, 2]}
    _, hidden = await client.post(ROUTE, chat(script=tokens, ignore_eos=True, max_tokens=3))
    _, shown = await client.post(
        ROUTE, chat(script=tokens, ignore_eos=True, max_tokens=3, skip_special_tokens=False)
    )
    assert "<|im_end|>" not in hidden["choices"][0]["message"]["content"]
    assert shown["choices"][0]["message"]["content"].endswith("<|im_end|>")
