"""`litellm` with our address as an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path

from support.cluster import MODEL

from .conftest import ClientEnvironment, Local

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def test_every_call_gets_the_answer_of_plain_http(
    clients: ClientEnvironment, local: Local, tmp_path: Path
) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "prompt": "Once upon a time", "max_tokens": 6}
    found = clients.script("litellm_requests.py", local.url, asked, tmp_path)
    shared = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    chat = local.client.ok("/v1/chat/completions", {**shared, "messages": MESSAGES})
    text = local.client.ok("/v1/completions", {**shared, "prompt": "Once upon a time"})["choices"][0]["text"]
    message = [chat["choices"][0]["message"]["content"], "length", 6]
    assert found == {
        "chat": message,
        "chat, streamed": message,
        "completion": [text, "length", 6],
        "completion, streamed": text,
        "async chat": message,
        "async chat, streamed": message,
        "async completion": [text, "length", 6],
        "refusal": ["NotFoundError", 404],
    }
