"""The `openai` package: each request whole and streamed, some of them both sync and async.

Argument: the server's address. Standard input: `{name: [resource, body]}` with a resource such as
`chat.completions`. Prints `{way: {name: answer or list of chunks}}`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

from openai import AsyncOpenAI, OpenAI

url = sys.argv[1] + "/v1"
requests: dict[str, tuple[str, dict[str, Any]]] = json.load(sys.stdin)

# Which samples are best is known at the end.
STREAMED = [name for name, (_, body) in requests.items() if "best_of" not in body]
SOME = STREAMED[::4]

# Fields that the package doesn't declare; it sends those given as `extra_body`.
EXTRA = ("top_k", "ignore_eos", "guided_regex")


def create(client: Any, name: str, **more: Any) -> Any:
    resource, body = requests[name]
    declared = {field: value for field, value in body.items() if field not in EXTRA}
    extra = {field: value for field, value in body.items() if field in EXTRA}
    return reduce(getattr, resource.split("."), client).create(**declared, extra_body=extra, **more)


def dump(answer: Any) -> Any:
    return answer.model_dump(mode="json", by_alias=True, exclude_unset=True)


def streaming(name: str) -> dict[str, Any]:
    if requests[name][0] == "responses":
        return {"stream": True}
    return {"stream": True, "stream_options": {"include_usage": True}}


def streamed(client: OpenAI, name: str) -> list[Any]:
    with create(client, name, **streaming(name)) as chunks:
        return [dump(chunk) for chunk in chunks]


async def asynchronous() -> tuple[list[Any], list[Any]]:
    async def whole(client: AsyncOpenAI, name: str) -> Any:
        return dump(await create(client, name))

    async def chunks(client: AsyncOpenAI, name: str) -> list[Any]:
        return [dump(chunk) async for chunk in await create(client, name, **streaming(name))]

    async with AsyncOpenAI(base_url=url, max_retries=0) as client:
        return (
            await asyncio.gather(*(whole(client, name) for name in SOME)),
            await asyncio.gather(*(chunks(client, name) for name in STREAMED)),
        )


with OpenAI(base_url=url, max_retries=0) as client, ThreadPoolExecutor(8) as threads:
    whole = list(threads.map(lambda name: dump(create(client, name)), requests))
    chunks = list(threads.map(lambda name: streamed(client, name), SOME))
async_whole, async_chunks = asyncio.run(asynchronous())
print(
    json.dumps(
        {
            "sync": dict(zip(requests, whole, strict=True)),
            "async": dict(zip(SOME, async_whole, strict=True)),
            "sync streamed": dict(zip(SOME, chunks, strict=True)),
            "async streamed": dict(zip(STREAMED, async_chunks, strict=True)),
        }
    )
)
