"""A small HTTP client for tests: JSON in, JSON out, server-sent events as a list or one by one."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp


class Client:
    def __init__(self, url: str, *, key: str | None = None, ca_file: str | None = None) -> None:
        """`ca_file`: whom to trust when the URL is https."""
        self.url = url
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._ca_file = ca_file

    def _session(self, **options: Any) -> aiohttp.ClientSession:
        trust = True if self._ca_file is None else ssl.create_default_context(cafile=self._ca_file)
        connector = aiohttp.TCPConnector(ssl=trust)
        return aiohttp.ClientSession(connector=connector, headers=self._headers, **options)

    def get(self, path: str) -> tuple[int, Any]:
        return asyncio.run(self.request("GET", path, None))

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """`body`: JSON-able, or bytes sent as they are."""
        return asyncio.run(self.request("POST", path, body))

    def ok(self, path: str, body: Any) -> Any:
        status, answer = self.post(path, body)
        assert status == 200, f"{path}: {status} {answer}"
        return answer

    def post_all(self, path: str, bodies: Sequence[Any], *, stagger: float = 0.0) -> list[tuple[int, Any]]:
        """All at once, `stagger` seconds apart; answers in the order of the bodies."""

        async def one(i: int, body: Any) -> tuple[int, Any]:
            await asyncio.sleep(i * stagger)
            return await self.request("POST", path, body)

        async def everything() -> list[tuple[int, Any]]:
            return list(await asyncio.gather(*(one(i, body) for i, body in enumerate(bodies))))

        return asyncio.run(everything())

    def events(self, path: str, body: Any) -> list[Any]:
        """All server-sent events of a streamed answer; `[DONE]` must come last and is left out."""

        async def collect() -> list[Any]:
            async with self.stream(path, body) as events:
                return [event async for event in events]

        events = asyncio.run(collect())
        assert events, f"{path}: no event at all"
        assert events[-1] == "[DONE]", f"{path}: the stream ends with {events[-1]!r}"
        return events[:-1]

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by `name{labels}`."""
        status, text = asyncio.run(self.request("GET", "/metrics", None))
        assert status == 200
        rows = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}

    @asynccontextmanager
    async def stream(self, path: str, body: Any) -> AsyncIterator[AsyncIterator[Any]]:
        """Leaving the block early closes the connection."""
        async with (
            self._session() as session,
            session.post(self.url + path, json={**body, "stream": True}) as response,
        ):
            assert response.status == 200, f"{path}: {response.status} {await response.text()}"

            async def events() -> AsyncIterator[Any]:
                async for line in response.content:
                    if line.startswith(b"data: "):
                        data = line[6:].strip()
                        yield "[DONE]" if data == b"[DONE]" else json.loads(data)

            yield events()

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        options: dict[str, Any] = {}
        if isinstance(body, bytes):
            options = {"data": body, "headers": {"Content-Type": "application/json"}}
        elif body is not None:
            options = {"json": body}
        timeout = aiohttp.ClientTimeout(total=300)
        async with (
            self._session(timeout=timeout) as session,
            session.request(method, self.url + path, **options) as response,
        ):
            text = await response.text()
            if "json" in response.content_type:
                return response.status, json.loads(text)
            return response.status, text
