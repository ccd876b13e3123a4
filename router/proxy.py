"""Plain calls to workers: one answer from any decode worker, or one from every worker."""

from __future__ import annotations

import asyncio
import dataclasses

import aiohttp
import msgspec
from aiohttp import web

from diptych.common_config import get_router
from diptych.router.errors import RouterError
from diptych.router.legs import error_message, relayed_headers
from diptych.router.middleware import worker_headers
from diptych.router.registry import WorkerRegistry
from diptych.router.workers import Worker, WorkerRole, connection_reason


@dataclasses.dataclass(frozen=True)
class WorkerAnswer:
    """What one worker said to a fan-out call."""

    worker: Worker
    status: int | None
    """None: no answer; `body` then holds the reason."""
    body: bytes

    @property
    def ok(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    def describe(self) -> dict[str, object]:
        """For a JSON answer: url, role, status and the worker's JSON (or its error as a sentence)."""
        entry: dict[str, object] = {"url": self.worker.url, "role": self.worker.role, "status": self.status}
        if self.status is None:
            entry["error"] = self.body.decode()
        elif not self.ok:
            entry["error"] = error_message(self.body)
        else:
            try:
                entry["answer"] = msgspec.json.decode(self.body)
            except msgspec.DecodeError:
                entry["answer"] = self.body.decode("utf-8", "replace")
        return entry


class Proxy:
    """Non-generating calls. Such calls may be repeated freely, so the next worker is tried on failure."""

    def __init__(self, session: aiohttp.ClientSession, registry: WorkerRegistry) -> None:
        self._session = session
        self._registry = registry

    async def to_decode(self, request: web.Request) -> web.Response:
        """The same method, path and body to the first healthy decode worker that answers; its answer as
        it is. Raises RouterError (503) when there is none."""
        body = await request.read()
        headers = self._headers(request)
        for worker in self._registry.healthy(WorkerRole.DECODE):
            try:
                async with self._session.request(
                    request.method,
                    worker.url + request.path_qs,
                    data=body or None,
                    headers=headers,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=get_router().request_timeout),
                ) as response:
                    answer = await response.read()
            except aiohttp.ClientConnectorError as error:
                worker.mark_down(f"no connection ({connection_reason(error)})")
                continue
            except (aiohttp.ClientError, OSError):
                worker.suspect()
                continue
            kept = relayed_headers(response)
            kept.pop("Content-Length", None)
            return web.Response(status=response.status, body=answer, headers=kept)
        reason = "; ".join(f"{w}: {w.reason or 'broke off'}" for w in self._registry.of(WorkerRole.DECODE))
        raise RouterError(503, f"no decode worker answers: {reason or 'none is configured'}", retry_after=1)

    async def to_all(self, request: web.Request, method: str | None = None) -> list[WorkerAnswer]:
        """The same path and body to every worker at once, healthy or not, in their order."""
        body = await request.read()
        headers = self._headers(request)
        return await asyncio.gather(
            *(
                self._one(w, method or request.method, request.path_qs, body, headers)
                for w in self._registry.workers
            )
        )

    async def _one(
        self, worker: Worker, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> WorkerAnswer:
        limit = get_router().connect_timeout
        try:
            async with self._session.request(
                method,
                worker.url + path,
                data=body or None,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=limit),
            ) as response:
                return WorkerAnswer(worker, response.status, await response.read())
        except (aiohttp.ClientError, OSError) as error:
            return WorkerAnswer(worker, None, connection_reason(error).encode())

    @staticmethod
    def _headers(request: web.Request) -> dict[str, str]:
        headers = worker_headers(request)
        if "Content-Type" in request.headers:
            headers["Content-Type"] = request.headers["Content-Type"]
        return headers
