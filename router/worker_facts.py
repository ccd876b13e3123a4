"""What a worker says about itself: its role, bootstrap port, and the models that it serves.

Workers of other systems answer these routes too, with more fields, fewer, or others' types: what can't be
read counts as not said.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import aiohttp
import msgspec

from diptych.common_config import get_router
from diptych.httpserver.access import Access, own_authorization


@dataclasses.dataclass(frozen=True)
class WorkerFacts:
    """The part of `/server_info` that the router uses or shows; None where the worker doesn't say."""

    mode: str | None = None
    """`disaggregation_mode`: prefill, decode, or null (a worker that does both)."""
    bootstrap_port: int | None = None
    shown: dict[str, object] = dataclasses.field(default_factory=dict)
    """What the router's own `/server_info` repeats."""


SHOWN = (
    "version",
    "model_path",
    "tokenizer_path",
    "served_model_name",
    "weight_version",
    "model_type",
    "context_length",
    "page_size",
    "dp_size",
    "max_total_num_tokens",
    "status",
)
"""Fields of a worker's `/server_info` that are repeated. None of them is a secret."""


def read_facts(info: dict[str, Any]) -> WorkerFacts:
    """From the JSON of `/server_info`."""
    mode, port = info.get("disaggregation_mode"), info.get("disaggregation_bootstrap_port")
    record = info.get("record")
    flat = record | info if isinstance(record, dict) else info  # ours has the page size in the record alone
    return WorkerFacts(
        mode=mode if isinstance(mode, str) else None,
        bootstrap_port=port if isinstance(port, int) and 0 < port < 65536 else None,
        shown={name: flat[name] for name in SHOWN if name in flat},
    )


def models_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The model objects of `/v1/models`; empty if there are none to be found."""
    data = answer.get("data")
    entries = data if isinstance(data, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


class WorkerClient:
    """The router's own questions to one worker: never a client's, so with the router's key."""

    def __init__(self, session: aiohttp.ClientSession, url: str, limit: float | None = None) -> None:
        self._session = session
        self._url = url
        self._timeout = aiohttp.ClientTimeout(
            total=limit or max(get_router().health_interval, get_router().connect_timeout)
        )
        self.key_refused = ""
        """What is wrong with the key, as the last answer to `json` has it; empty when nothing is."""

    async def health(self) -> int:
        """The status of `GET /health`. Raises aiohttp.ClientError or OSError (a time-out is one)."""
        async with self._get("/health") as response:
            await response.read()
            return response.status

    async def facts(self) -> WorkerFacts | None:
        """None if the worker gives no answer that can be read."""
        info = await self.json("/server_info")
        return None if info is None else read_facts(info)

    async def models(self) -> list[dict[str, Any]] | None:
        """None if the worker doesn't say."""
        answer = await self.json("/v1/models")
        return None if answer is None else models_of(answer) or None

    async def metrics(self) -> str:
        """The text of `GET /metrics`. Raises aiohttp.ClientError or OSError."""
        async with self._get("/metrics") as response:
            response.raise_for_status()
            return (await response.read()).decode("utf-8", "replace")

    async def json(self, path: str) -> dict[str, Any] | None:
        """The object that a GET answers; None if there is none."""
        try:
            async with self._get(path) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError):
            return None
        self.key_refused = ""
        if response.status in (401, 403):
            self.key_refused = f"answers {response.status} on {path}: it doesn't take this router's API key"
        try:
            answer = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return None
        return answer if response.status == 200 and isinstance(answer, dict) else None

    def _get(self, path: str) -> aiohttp.client._RequestContextManager:
        authorization = own_authorization(Access.READING)
        headers = {"Authorization": authorization} if authorization else {}
        return self._session.get(self._url + path, timeout=self._timeout, headers=headers)
