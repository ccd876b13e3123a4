"""`litellm`: chat and completions, sync and async, whole and streamed; a refusal.

Argument: the server's address. Standard input: `{"model", "messages", "prompt", "max_tokens"}`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

asked = json.load(sys.stdin)
litellm.suppress_debug_info = True
server: dict[str, Any] = {"api_base": sys.argv[1] + "/v1", "api_key": "not checked", "num_retries": 0}
shared = {**server, "max_tokens": asked["max_tokens"], "temperature": 0}
chat = {**shared, "model": f"openai/{asked['model']}", "messages": asked["messages"]}
text = {**shared, "model": f"text-completion-openai/{asked['model']}", "prompt": asked["prompt"]}
streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def of_chat(answer: Any) -> list[Any]:
    return [
        answer.choices[0].message.content,
        answer.choices[0].finish_reason,
        answer.usage.completion_tokens,
    ]


def of_text(answer: Any) -> list[Any]:
    return [answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens]


async def asynchronously() -> dict[str, Any]:
    whole, chunks, completion = await asyncio.gather(
        litellm.acompletion(**chat),
        litellm.acompletion(**chat, **streamed),
        litellm.atext_completion(**text),
    )
    return {
        "async chat": of_chat(whole),
        "async chat, streamed": of_chat(litellm.stream_chunk_builder([chunk async for chunk in chunks])),
        "async completion": of_text(completion),
    }


try:
    litellm.completion(**{**chat, "model": "openai/nobody"})
    refusal = None
except litellm.NotFoundError as error:
    refusal = [type(error).__name__, error.status_code]

print(
    json.dumps(
        {
            "chat": of_chat(litellm.completion(**chat)),
            "chat, streamed": of_chat(
                litellm.stream_chunk_builder(list(litellm.completion(**chat, **streamed)))
            ),
            "completion": of_text(litellm.text_completion(**text)),
            "completion, streamed": "".join(
                chunk.choices[0].text or "" for chunk in litellm.text_completion(**text, stream=True)
            ),
            **asyncio.run(asynchronously()),
            "refusal": refusal,
        }
    )
)
