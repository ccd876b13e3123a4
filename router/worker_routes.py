"""`/workers`: list, add, change and remove workers while the router runs.

Workers that register themselves use the same `POST`, with `instance_id` and `lease`, again and again.
"""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from aiohttp import web
from msgspec import UNSET

from diptych.common_config import get_router
from diptych.router.answers import json_response
from diptych.router.errors import RouterError
from diptych.router.models import served_names
from diptych.router.registry import WorkerRegistry
from diptych.router.worker_facts import WorkerClient
from diptych.router.worker_requests import NewWorker, WorkerChanges, decode, role_of, worker_url
from diptych.router.workers import Origin, Worker, WorkerRole, role_mismatch

_MAX_DISMISSED = 1024


def describe(worker: Worker, *, leaving: bool = False) -> dict[str, object]:
    """One worker for JSON."""
    return {
        "id": worker.id,
        "url": worker.url,
        "role": worker.role,
        "worker_type": worker.role,
        "model_id": worker.facts.shown.get("served_model_name") or next(iter(served_names([worker])), None),
        "models": served_names([worker]),
        "bootstrap_port": worker.bootstrap_port,
        "state": "draining" if leaving else "up" if worker.healthy else "down",
        "healthy": worker.healthy,
        "is_healthy": worker.healthy,
        "reason": worker.reason or None,
        "warning": worker.warning or None,
        "breaker": worker.breaker.state,
        "in_flight": worker.in_flight,
        "load": worker.in_flight,
        "connection_mode": "http",
        "origin": worker.origin,
        "instance_id": worker.instance_id,
        "lease": worker.lease,
        "labels": worker.labels,
        "added_at": worker.added_at,
    }


class WorkerRoutes:
    """The handlers. `session` asks a new worker who it is."""

    def __init__(self, registry: WorkerRegistry, session: aiohttp.ClientSession) -> None:
        self._registry = registry
        self._session = session
        self._dismissed: dict[str, None] = {}
        """Processes that an operator removed, by instance id, oldest first: they don't come back by
        themselves."""

    def list(self) -> web.Response:
        workers = self._registry.workers
        shown = [describe(w) for w in workers] + [describe(w, leaving=True) for w in self._registry.leaving]
        stats = {
            "total_workers": len(workers),
            "healthy_workers": sum(w.healthy for w in workers),
            "total_models": len({w.models for w in workers if w.models}),
            "total_load": sum(w.in_flight for w in workers),
            "by_type": {"regular": 0} | {role: len(self._registry.of(role)) for role in WorkerRole},
        }
        return json_response({"workers": shown, "total": len(shown), "stats": stats})

    def show(self, wanted: str) -> web.Response:
        worker = self._find(wanted)
        return json_response(describe(worker, leaving=worker in self._registry.leaving))

    async def add(self, body: bytes) -> web.Response:
        """202 for one that is new here, or a new process of one that was; 200 for a renewed lease."""
        asked = decode(body, NewWorker)
        url = worker_url(asked.url)
        role = role_of(asked)
        port = asked.bootstrap_port
        if asked.instance_id is None:
            # Told by a third party: the worker itself may know better. One that isn't up yet can't be asked.
            facts = await WorkerClient(self._session, url, get_router().connect_timeout).facts()
            if facts is not None and role is not None and (wrong := role_mismatch(role, facts)):
                raise RouterError(400, f"{url}: {wrong}", param="role")
            if role is None and facts is not None and facts.mode in list(WorkerRole):
                role = WorkerRole(facts.mode)
            if port is UNSET and facts is not None and facts.bootstrap_port is not None:
                port = facts.bootstrap_port
        if role is None:
            raise RouterError(
                400,
                "give role, prefill or decode: the worker can't be asked now, or is neither",
                param="role",
            )
        if role is WorkerRole.DECODE:
            port = None
        elif port is UNSET:
            port = get_router().default_bootstrap_port
        worker = Worker(
            role,
            url,
            port,
            origin=Origin.API if asked.instance_id is None else Origin.SELF,
            instance_id=asked.instance_id,
            labels={} if asked.labels is UNSET else asked.labels,
        )
        if asked.model_id is not None:
            worker.models = frozenset({asked.model_id})
        return self._enter(worker, None if asked.lease is UNSET else asked.lease)

    def change(self, wanted: str, body: bytes) -> web.Response:
        """Only what is named is changed."""
        worker = self._find(wanted)
        asked = decode(body, WorkerChanges)
        if asked.bootstrap_port is not UNSET:
            if worker.role is WorkerRole.DECODE and asked.bootstrap_port is not None:
                raise RouterError(400, "a decode worker has no bootstrap port", param="bootstrap_port")
            worker.bootstrap_port = asked.bootstrap_port
        if asked.labels is not UNSET:
            worker.labels = asked.labels
        if asked.lease is not UNSET:
            self._registry.lend(worker, asked.lease)
        return json_response(_done(worker, "changed", f"{worker} was changed"))

    def remove(self, wanted: str, query: Mapping[str, str]) -> web.Response:
        """202: it gets no new request, and what runs may finish. With `instance_id`, only if it is still that
        process: one that took over its address is left alone (409)."""
        worker = self._find(wanted)
        if (given := query.get("instance_id")) is not None and worker.instance_id != given:
            raise RouterError(409, f"{worker} is another process now", code="another_instance")
        if worker in self._registry.workers:
            self._registry.remove(worker, "asked to")
            if worker.instance_id is not None and given is None:
                self._dismiss(worker.instance_id)
        state = "draining" if worker.in_flight else "removed"
        message = f"{worker} gets no new requests; {worker.in_flight} are running"
        return json_response(_done(worker, state, message), 202)

    def _enter(self, worker: Worker, lease: float | None) -> web.Response:
        """Add, renew or replace; nothing is awaited, so that two requests can't both add one URL."""
        known = self._registry.by_url(worker.url)
        if known is None and worker.instance_id in self._dismissed:
            raise RouterError(
                409,
                f"{worker.url} was removed by an operator: restart it, or add it with a POST to /workers "
                "without instance_id",
                code="worker_removed",
            )
        if known is None:
            return self._accept(worker, lease)
        if worker.instance_id is None:
            raise RouterError(
                409, f"{known} is known already, as {known.id}", code="worker_exists", param="url"
            )
        if known.origin is Origin.FLAG and known.role is not worker.role:
            raise RouterError(
                409,
                f"{worker.url} registers as a {worker.role} worker, but the router was started with it as "
                f"--{known.role}",
                code="worker_exists",
                param="role",
            )
        if known.instance_id not in (None, worker.instance_id) or known.role is not worker.role:
            if known.origin is not Origin.SELF:  # whoever named the address meant whatever listens there
                worker.origin, lease = known.origin, known.lease
            self._registry.remove(known, "another process has its address")
            return self._accept(worker, lease)
        known.instance_id, known.bootstrap_port = worker.instance_id, worker.bootstrap_port
        known.labels |= worker.labels
        if known.origin is Origin.SELF:
            self._registry.lend(known, lease)
        return json_response(_done(known, "renewed", f"{known} is known"))

    def _accept(self, worker: Worker, lease: float | None) -> web.Response:
        self._registry.add(worker)
        self._registry.lend(worker, lease)
        answer = json_response(_done(worker, "accepted", f"{worker} gets requests once it is healthy"), 202)
        answer.headers["Location"] = f"/workers/{worker.id}"
        return answer

    def _dismiss(self, instance_id: str) -> None:
        self._dismissed[instance_id] = None
        while len(self._dismissed) > _MAX_DISMISSED:
            del self._dismissed[next(iter(self._dismissed))]

    def _find(self, wanted: str) -> Worker:
        """By id, or by URL."""
        worker = self._registry.by_id(wanted)
        if worker is None and "://" in wanted:
            worker = self._registry.by_url(worker_url(wanted))
        if worker is None:
            raise RouterError(404, f"there is no worker {wanted}", code="not_found")
        return worker


def _done(worker: Worker, status: str, message: str) -> dict[str, object]:
    return {
        "success": True,
        "status": status,
        "message": message,
        "worker_id": worker.id,
        "url": worker.url,
        "location": f"/workers/{worker.id}",
        "worker": describe(worker, leaving=status in ("draining", "removed")),
    }
