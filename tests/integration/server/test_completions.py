from __future__ import annotations

from .conftest import Client, say

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
    prompt = "The capital of France"
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    _, answer = await client.post(ROUTE, body)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    assert "".join(logprobs["tokens"]) == prompt
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:3] == [-0.25, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {logprobs["tokens"][1]: -0.25}
    assert logprobs["text_offset"] == [
        sum(len(token) for token in logprobs["tokens"][:k]) for k in range(len(logprobs["tokens"]))
    ]
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
