from __future__ import annotations

import pytest

from .conftest import Client, chat, say

ROUTE = "/v1/completions"


async def test_a_completion_has_openais_shape(client: Client):
    status, answer = await client.post(ROUTE, {"prompt": say("Hello you")})
    assert status == 200
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("Hello you", "stop", None)


async def test_batches_and_n_are_numbered_prompt_by_prompt(client: Client):
    prompts = [say("first"), say("second")]
    _, answer = await client.post(ROUTE, {"prompt": prompts, "n": 2})
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "first"),
        (1, "first"),
        (2, "second"),
        (3, "second"),
    ]
    chunks = await client.events(ROUTE, {"prompt": prompts, "n": 2})
    for index, text in enumerate(["first", "first", "second", "second"]):
        mine = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(mine) == text


async def test_token_ids_are_prompts_too(client: Client):
    _, answer = await client.post("/tokenize", {"prompt": say("by ids")})
    ids = answer["tokens"]
    _, alone = await client.post(ROUTE, {"prompt": ids})
    assert alone["choices"][0]["text"] == "by ids"
    assert alone["usage"]["prompt_tokens"] == len(ids)
    _, batch = await client.post(ROUTE, {"prompt": [ids, ids]})
    assert [choice["text"] for choice in batch["choices"]] == ["by ids", "by ids"]


async def test_echo_puts_the_prompt_first(client: Client):
    prompt = say("tail")
    _, answer = await client.post(ROUTE, {"prompt": prompt, "echo": True})
    assert answer["choices"][0]["text"] == prompt + "tail"
    _, tokens = await client.post("/tokenize", {"prompt": prompt})
    _, by_ids = await client.post(ROUTE, {"prompt": tokens["tokens"], "echo": True})
    assert by_ids["choices"][0]["text"] == prompt + "tail"
    chunks = await client.events(ROUTE, {"prompt": prompt, "echo": True})
    assert chunks[0]["choices"][0]["text"].startswith(prompt)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == prompt + "tail"


async def test_prompts_are_scored_without_output(client: Client):
    prompt = "The capital of 世界 is France"
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    _, answer = await client.post(ROUTE, body)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:3] == [-0.25, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {logprobs["tokens"][1]: -0.25}
    # A character of several tokens counts with the one that ends it.
    assert logprobs["tokens"][4].startswith("bytes:")
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or prompt.startswith(token, offset)
    assert answer["usage"]["completion_tokens"] == 0


async def test_streamed_logprobs_are_those_of_the_whole_answer(client: Client):
    body = {"prompt": say("a few words more"), "echo": True, "logprobs": 2}
    _, whole = await client.post(ROUTE, body)
    expected = whole["choices"][0]["logprobs"]
    parts: dict[str, list] = {name: [] for name in expected}
    for chunk in await client.events(ROUTE, body):
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            parts[name] += values
    assert parts == expected


async def test_usage_closes_the_stream_when_asked(client: Client):
    body = {"prompt": [say("x"), say("y z")], "stream_options": {"include_usage": True}}
    _, whole = await client.post(ROUTE, body)
    chunks = await client.events(ROUTE, body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


async def test_suffix_is_refused_by_name(client: Client):
    status, answer = await client.post(ROUTE, {"prompt": "x", "suffix": "y"})
    assert (status, answer["error"]["param"]) == (400, "suffix")


@pytest.mark.parametrize("route", [ROUTE, "/v1/chat/completions"])
async def test_usage_comes_with_every_chunk_when_asked(client: Client, route: str):
    prompt = {"prompt": say("x y z", delay=0.02)} if route == ROUTE else chat("x y z", script={"delay": 0.02})
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await client.events(route, prompt | {"stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert last["usage"] == chunks[-1]["usage"]


async def test_best_of_returns_the_likeliest_samples_and_counts_all(client: Client):
    body = {"prompt": [say("a b", unlike=True), say("c d", unlike=True)], "seed": 3, "logprobs": 0}
    _, all_five = await client.post(ROUTE, body | {"n": 5})
    _, best = await client.post(ROUTE, body | {"n": 2, "best_of": 5})

    def mean(choice: dict) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    expected = [
        choice
        for drawn in (all_five["choices"][:5], all_five["choices"][5:])
        for choice in sorted(drawn, key=mean, reverse=True)[:2]
    ]
    assert [c["index"] for c in best["choices"]] == [0, 1, 2, 3]
    assert [c | {"index": 0} for c in best["choices"]] == [c | {"index": 0} for c in expected]
    assert best["usage"] == all_five["usage"]
    _, unseen = await client.post(ROUTE, {**body, "logprobs": None, "n": 2, "best_of": 5})
    assert [c["text"] for c in unseen["choices"]] == [c["text"] for c in best["choices"]]
    assert all(c["logprobs"] is None for c in unseen["choices"])


@pytest.mark.parametrize("fields", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 0}])
async def test_a_best_of_that_cannot_be_had_is_refused(client: Client, fields: dict):
    status, answer = await client.post(ROUTE, {"prompt": "x", **fields})
    assert (status, answer["error"]["param"]) == (400, "best_of")


async def test_a_request_that_does_not_say_gets_what_its_route_usually_gives(client: Client):
    await client.post("/v1/completions", {"prompt": say("x")})
    await client.post("/generate", {"text": say("x")})
    messages = await client.received()
    asked = [message["sampling"]["max_new_tokens"] for message in messages if "sampling" in message]
    assert asked[-2:] == [16, 128]
