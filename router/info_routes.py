"""Routes that say what is behind this router: its workers' answers, joined as if they were one server's."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from diptych.common_config import readback
from diptych.router.answers import json_response
from diptych.router.errors import RouterError
from diptych.router.openapi import joined_document
from diptych.router.proxy import Proxy
from diptych.router.registry import WorkerRegistry
from diptych.router.worker_facts import WorkerClient
from diptych.router.worker_routes import describe
from diptych.router.workers import Worker, WorkerRole

ASK_SECONDS = 2.0
"""What one worker gets to answer; one that hangs is left out."""

OWN_FIELDS = ("version", "status")
"""Not taken over from a worker: the router has its own."""


class InfoRoutes:
    def __init__(self, registry: WorkerRegistry, session: aiohttp.ClientSession, proxy: Proxy) -> None:
        self._registry = registry
        self._session = session
        self._proxy = proxy

    async def models(self) -> list[dict[str, Any]]:
        """The models that a healthy worker of each side serves, each once.

        What a model object says is decode's, but for the length: the shortest of all who serve it. Raises
        RouterError (503) if no decode worker says what it serves."""
        by_role = await asyncio.gather(*(self._models_of(role) for role in WorkerRole))
        prefill, decode = by_role
        if not any(decode):
            raise RouterError(
                503, self._registry.missing() or "no decode worker says what it serves", retry_after=1
            )
        open_prefill = any(answer is None for answer in prefill)  # it doesn't say, so it may serve anything
        lengths: dict[str, list[int]] = {}
        ids: dict[WorkerRole, set[str]] = {role: set() for role in WorkerRole}
        merged: dict[str, dict[str, Any]] = {}
        for role, answers in zip(WorkerRole, by_role, strict=True):
            for model in (entry for answer in answers for entry in answer or ()):
                ids[role].add(model["id"])
                if role is WorkerRole.DECODE:
                    merged.setdefault(model["id"], dict(model))
                if isinstance(length := model.get("max_model_len"), int):
                    lengths.setdefault(model["id"], []).append(length)
        for name, model in merged.items():
            if name in lengths:
                model["max_model_len"] = min(lengths[name])
        return [m for name, m in merged.items() if open_prefill or name in ids[WorkerRole.PREFILL]]

    async def list_models(self) -> web.Response:
        return json_response({"object": "list", "data": await self.models()})

    async def show_model(self, name: str) -> web.Response:
        for model in await self.models():
            if model["id"] == name:
                return json_response(model)
        raise RouterError(
            404, f"the model {name!r} is not served here", code="model_not_found", param="model"
        )

    async def server_info(self, ready: bool) -> web.Response:
        """The router's settings, and of each worker what matters to whoever looks at them all. The flat
        fields that clients of a single worker read are a healthy decode worker's."""
        workers = self._registry.workers
        facts = await asyncio.gather(*(self._client(w).facts() for w in workers))
        shown: list[dict[str, object]] = []
        flat: dict[str, object] = {}
        for worker, fact in zip(workers, facts, strict=True):
            if fact is not None:
                worker.facts = fact
            said = None if fact is None else fact.shown
            shown.append(describe(worker) | {"server_info": said})
            if worker.role is WorkerRole.DECODE and worker.healthy and said and not flat:
                flat = {name: value for name, value in said.items() if name not in OWN_FIELDS}
        leaving = [describe(w, leaving=True) for w in self._registry.leaving]
        return json_response(
            flat
            | {
                "role": "router",
                "version": version("diptych"),
                "ready": ready,
                "status": "ready" if ready else "not_ready",
                "workers": [*shown, *leaving],
                "config": readback(),
            }
        )

    async def document(self) -> web.Response:
        """The OpenAPI document; the first healthy decode worker that has one says what the workers take."""
        told = None
        for worker in self._registry.healthy(WorkerRole.DECODE):
            told = await self._client(worker).json("/openapi.json")
            if told is not None:
                break
        return json_response(joined_document(told))

    async def get_load(self, request: web.Request) -> web.Response:
        """The entries of every worker that answers, one list; each says whose it is."""
        entries: list[object] = []
        for answer in await self._proxy.to_all(request, limit=ASK_SECONDS):
            if not answer.ok:
                continue
            try:
                loads = msgspec.json.decode(answer.body)
            except msgspec.DecodeError:
                continue
            whose = {"worker": answer.worker.url, "role": answer.worker.role}
            entries += [load | whose for load in _as_list(loads) if isinstance(load, dict)]
        return json_response(entries)

    async def _models_of(self, role: WorkerRole) -> list[list[dict[str, Any]] | None]:
        """One answer of each healthy worker of that side: None where it doesn't say."""
        healthy = self._registry.healthy(role)
        return await asyncio.gather(*(self._client(w).models() for w in healthy))

    def _client(self, worker: Worker) -> WorkerClient:
        return WorkerClient(self._session, worker.url, ASK_SECONDS)


def _as_list(loads: object) -> list[object]:
    return loads if isinstance(loads, list) else [loads]
