"""A streaming client of the OpenAI completions route that notes when each piece of output arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import aiohttp
import msgspec

from diptych.bench.stats import RequestRecord
from diptych.bench.workload import poisson_arrivals


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_event_decoder = msgspec.json.Decoder(_Event)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how requests are sent."""

    url: str
    model: str
    output_len: int
    api_key: str | None = None


class CompletionsClient:
    """Use as an async context manager."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> CompletionsClient:
        key = self._target.api_key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def complete(self, prompt: list[int]) -> RequestRecord:
        """One request. What goes wrong is in the record's `error`, never raised."""
        assert self._session is not None, "use the client as a context manager"
        body = msgspec.json.encode(
            {
                "model": self._target.model,
                "prompt": prompt,
                "max_tokens": self._target.output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        record = RequestRecord(input_tokens=len(prompt), sent=time.monotonic())
        headers = {"Content-Type": "application/json"}
        url = self._target.url.rstrip("/") + "/v1/completions"
        try:
            async with self._session.post(url, data=body, headers=headers) as response:
                if response.status != 200:
                    text = await response.text()
                    record.error = f"HTTP {response.status}: {text[:200]}"
                else:
                    await _read_events(response, record)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.finished = time.monotonic()
        if record.error is None:
            record.error = self._check(record)
        return record

    def _check(self, record: RequestRecord) -> str | None:
        """A benchmark of answers that are too short would flatter the server."""
        if not record.token_times:
            return "the stream ended without output"
        if record.output_tokens != self._target.output_len:
            return f"{record.output_tokens} tokens came where {self._target.output_len} were asked for"
        return None


async def _read_events(response: aiohttp.ClientResponse, record: RequestRecord) -> None:
    pending = b""
    while chunk := await response.content.readany():
        now = time.monotonic()
        *events, pending = (pending + chunk).split(b"\n\n")
        for raw in events:
            data = raw.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = _event_decoder.decode(data)
            if event.error is not None:
                record.error = f"error event: {event.error.message}"
                return
            # Text may be empty for half a character; an empty event that only says why it ended is no token.
            if any(choice.text or choice.finish_reason is None for choice in event.choices):
                record.token_times.append(now)
            if event.usage is not None:
                record.output_tokens = event.usage.completion_tokens
    record.error = "the stream ended without [DONE]"


async def run_closed_loop(
    client: CompletionsClient, prompts: Sequence[list[int]], concurrency: int
) -> list[RequestRecord]:
    """`concurrency` users, each sending its next request when the last is answered."""
    queue = iter(prompts)
    records: list[RequestRecord] = []

    async def user() -> None:
        for prompt in queue:  # one iterator for all: each prompt is taken once
            records.append(await client.complete(prompt))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(user())
    return records


async def run_poisson(
    client: CompletionsClient, prompts: Sequence[list[int]], rate: float, seed: int
) -> list[RequestRecord]:
    """Requests arrive at their times whether or not earlier ones are answered."""
    start = asyncio.get_running_loop().time()

    async def at(offset: float, prompt: list[int]) -> RequestRecord:
        await asyncio.sleep(max(0.0, start + offset - asyncio.get_running_loop().time()))
        return await client.complete(prompt)

    arrivals = poisson_arrivals(len(prompts), rate, seed)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(at(t, p)) for t, p in zip(arrivals, prompts, strict=True)]
    return [task.result() for task in tasks]
