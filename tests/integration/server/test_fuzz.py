from __future__ import annotations

import json
import random

import pytest

from .conftest import Client, Worker, chat

VALUES = [
    *(None, True, False, 0, 1, -1, 2, 10**6, 2**63, 10**40, 0.5, -0.5, 1e308, "", "x", "\u0000", "é" * 300),
    *([], [1], ["x"], [[1, 2]], [None], [True], {}, {"a": 1}, {"5": 1}, {"text": "x"}, [{"role": "user"}]),
    *([{"role": "user", "content": "Hi"}], [{"role": "assistant", "tool_calls": [{}]}], {"stop": "x"}),
    *([{"type": "message", "role": "user", "content": [{"type": "input_text"}]}], [{"type": "reasoning"}]),
    *({"format": {"type": "json_schema"}}, {"effort": "low"}, ["message.output_text.logprobs"]),
]
SHARED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "min_tokens"),
    *("logit_bias", "max_tokens", "presence_penalty", "repetition_penalty", "stream", "rid"),
    *("bootstrap_room", "bootstrap_host", "bootstrap_port", "skip_special_tokens"),
)
ROUTES = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        ("messages", "logprobs", "top_logprobs", "chat_template_kwargs", "continue_final_message", "tools"),
    ),
    "/v1/completions": (
        {"prompt": "Hi", "max_tokens": 4},
        ("prompt", "echo", "logprobs", "best_of", "suffix", "stream_options"),
    ),
    "/v1/responses": (
        {"input": "Hi", "max_output_tokens": 16},
        ("input", "instructions", "text", "include", "top_logprobs", "reasoning", "metadata", "truncation"),
    ),
    "/generate": (
        {"text": "Hi", "sampling_params": {"max_new_tokens": 4}},
        ("text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    ),
    "/tokenize": ({"prompt": "Hi"}, ("prompt", "messages", "add_special_tokens")),
    "/detokenize": ({"tokens": [1]}, ("tokens", "skip_special_tokens")),
    "/abort_request": ({"rid": "x"}, ("rid", "abort_all")),
}


@pytest.mark.parametrize("path", ROUTES)
async def test_no_body_makes_a_worker_fail(client: Client, colocated: Worker, path: str):
    draw = random.Random(path)
    base, own = ROUTES[path]
    for _ in range(250):
        fields = draw.sample([*SHARED, *own * 2], k=draw.randint(1, 4))
        body = base | {name: draw.choice(VALUES) for name in fields}
        async with client.session.post(client.url + path, json=body) as response:
            text = await response.text()
            assert response.status < 500, (body, text)
            if response.status >= 400:
                assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
            assert '"internal_error"' not in text
    assert await client.running() == 0
    assert (await client.post("/v1/chat/completions", chat("fine")))[0] == 200
    assert colocated.stderr == ""


GENERATING = {
    "/v1/chat/completions": ("ChatRequest", {"logprobs": True}),
    "/v1/completions": ("CompletionRequest", {}),
    "/v1/responses": ("ResponsesRequest", {}),
    "/generate": ("GenerateRequest", {}),
}


@pytest.mark.parametrize("path", GENERATING)
async def test_numbers_are_taken_within_the_bounds_that_the_document_gives_and_no_further(
    client: Client, path: str
):
    component, more = GENERATING[path]
    base = ROUTES[path][0] | more
    _, document = await client.get("/openapi.json")
    properties = document["components"]["schemas"][component]["properties"]
    checked = 0
    for name, field in properties.items():
        if name.startswith("bootstrap_"):  # what a worker reads that is half of a pair
            continue
        for schema in field.get("anyOf", [field]):
            if schema.get("type") not in ("integer", "number"):
                continue
            below = schema["minimum"] - 1 if "minimum" in schema else schema["exclusiveMinimum"]
            for value in [below, *([schema["maximum"] + 1] if "maximum" in schema else [])]:
                status, answer = await client.post(path, base | {name: value})
                assert (status, answer["error"]["param"]) == (400, name), (name, value, answer)
                checked += 1
            if "minimum" in schema:
                status, answer = await client.post(path, base | {name: schema["minimum"]})
                refused = status == 400 and answer["error"]["param"] == name
                assert not refused or "is not supported" in answer["error"]["message"], answer
    assert checked >= 2
