"""The table's requests, and how they are asked: many at a time, answers kept whole."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from .rows import Fields, Refused
from .table import ROUTES

AT_ONCE = 12


@dataclass(frozen=True)
class Asked:
    route: str
    row: str
    variant: Fields | Refused
    streamed: bool

    @property
    def prompt(self) -> str:
        """The same for requests that have the same prompt."""
        body = self.body()
        return json.dumps([self.route, *(body.get(name) for name in PROMPT_FIELDS)])

    def body(self) -> Fields:
        fields = self.variant.fields if isinstance(self.variant, Refused) else self.variant
        body = ROUTES[self.route].body(fields)
        return body | {"stream": True} if self.streamed and self.row != "stream" else body


EVERYTHING = [
    Asked(path, row, variant, streamed)
    for path, route in ROUTES.items()
    for row, variants in route.rows.items()
    for variant in variants
    for streamed in (False, True)
]

PROMPT_FIELDS = (
    *("messages", "tools", "tool_choice", "add_generation_prompt", "continue_final_message", "prompt"),
    *("input", "instructions", "text", "input_ids"),
)

Reply = tuple[int, Any]
"""Status, and a body: JSON, or the events of a stream."""


async def reply(session: aiohttp.ClientSession, url: str, body: Any) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(url, data=data, headers={"Content-Type": "application/json"}) as response:
        text = (await response.read()).decode()
    if response.content_type != "text/event-stream":
        return response.status, json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return response.status, [json.loads(line) for line in lines if line != "[DONE]"]


async def ask_all(server: str, asked: list[Asked]) -> list[Reply]:
    limit = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:

        async def one(number: int, request: Asked) -> Reply:
            body = request.body()
            async with limit:
                # One client's ids are its own: another variant's request may still run.
                match body.get("rid"):
                    case str(rid) if rid:
                        body["rid"] = f"{rid} {number}"
                    case list(rids):
                        body["rid"] = [f"{rid} {number}" for rid in rids]
                return await reply(session, server + request.route, body)

        return await asyncio.gather(*(one(number, request) for number, request in enumerate(asked)))
