"""Plain calls to workers: one answer from any decode worker, or one from every worker."""

from __future__ import annotations

import asyncio
import dataclasses

import aiohttp
import msgspec
from aiohttp import web

from diptych.common_config import get_router
from diptych.router.answers import json_response
from diptych.router.call import asked_model
from diptych.router.errors import RouterError, error_type
from diptych.router.legs import error_message, relayed_headers
from diptych.router.middleware import worker_headers
from diptych.router.models import model_for
from diptych.router.registry import WorkerRegistry
from diptych.router.workers import Worker, WorkerRole, connection_reason

JOINT_SECONDS = 35.0
"""What each worker gets to answer a call that goes to all: a cache flush on a busy one may wait for 30 s."""


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

    def data(self) -> object:
        """The worker's JSON, or its text if it is none."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return self.body.decode("utf-8", "replace")

    def failure(self) -> str:
        """What went wrong, as a phrase; only if it isn't `ok`."""
        if self.status is None:
            return f"no answer ({self.body.decode()})"
        return f"answered {self.status}: {error_message(self.body)}"

    def describe(self) -> dict[str, object]:
        """For a JSON answer: url, role, status and the worker's JSON (or its error as a sentence)."""
        entry: dict[str, object] = {"url": self.worker.url, "role": self.worker.role, "status": self.status}
        if self.ok:
            entry["answer"] = self.data()
        else:
            entry["error"] = self.failure()
        return entry


class Proxy:
    """Non-generating calls. Such calls may be repeated freely, so the next worker is tried on failure."""

    def __init__(self, session: aiohttp.ClientSession, registry: WorkerRegistry) -> None:
        self._session = session
        self._registry = registry

    async def to_decode(self, request: web.Request) -> web.Response:
        """The same method, path and body to the first healthy decode worker that answers; its answer as
        it is. Raises RouterError (503) when there is none, and 404 for a model that nobody serves."""
        body = await request.read()
        headers = self._headers(request)
        model = model_for(self._registry, asked_model(body))
        for worker in self._registry.healthy(WorkerRole.DECODE, serving=model):
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
        raise RouterError(503, f"no decode worker answers: {reason or 'none is known'}", retry_after=1)

    async def to_all(
        self, request: web.Request, *, limit: float = JOINT_SECONDS, leaving: bool = False
    ) -> list[WorkerAnswer]:
        """The same method, path and body to every worker at once, healthy or not, in their order. Each has
        `limit` seconds. `leaving`: also to those that finish their last requests."""
        body = await request.read()
        headers = self._headers(request)
        workers = [*self._registry.workers, *(self._registry.leaving if leaving else ())]
        return await asyncio.gather(
            *(self._one(w, request.method, request.path_qs, body, headers, limit) for w in workers)
        )

    async def _one(
        self, worker: Worker, method: str, path: str, body: bytes, headers: dict[str, str], limit: float
    ) -> WorkerAnswer:
        try:
            async with self._session.request(
                method,
                worker.url + path,
                data=body or None,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=limit, sock_connect=get_router().connect_timeout),
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


def joint_answer(answers: list[WorkerAnswer], nothing_to_do: int | None = None) -> web.Response:
    """One answer for what every worker was asked to do; all that each said is in `workers`.

    Done by all: 200, `success`, and the fields that a decode worker answered, numbers added up over those
    workers, as from one server (a sample runs on one decode worker, whatever prefill had to do with it); of a
    `message` in which they differ, each worker's. Else OpenAI's `error` object: the 4xx that those who failed
    agree on, or a 502. `nothing_to_do`: by this status a worker says that it had nothing to do, which is no
    failure as long as another one had."""
    workers = [answer.describe() for answer in answers]
    failed = [answer for answer in answers if not answer.ok]
    if nothing_to_do is not None and len(failed) < len(answers):
        failed = [answer for answer in failed if answer.status != nothing_to_do]
    if not answers:
        status, message = 503, "no worker is known"
    elif failed:
        statuses = {answer.status for answer in failed}
        only = statuses.pop() if len(statuses) == 1 else None
        status = only if only is not None and 400 <= only < 500 else 502
        message = "; ".join(f"{answer.worker} {answer.failure()}" for answer in failed)
    else:
        joint = _joined([answer for answer in answers if answer.ok])
        return json_response({"success": True} | joint | {"workers": workers})
    error = {"message": message, "type": error_type(status), "param": None, "code": "worker_failed"}
    return json_response({"error": error, "success": False, "workers": workers}, status)


def _joined(answers: list[WorkerAnswer]) -> dict[str, object]:
    """The fields of one answer, from those of workers that all did it."""
    said = {answer.worker: data for answer in answers if isinstance(data := answer.data(), dict)}
    joint: dict[str, object] = {}
    for worker, fields in said.items():
        if worker.role is WorkerRole.DECODE:
            joint |= {name: _join(joint.get(name), value) for name, value in fields.items()}
    messages = {worker: fields["message"] for worker, fields in said.items() if "message" in fields}
    if len(set(map(str, messages.values()))) > 1:
        joint["message"] = "; ".join(f"{worker}: {message}" for worker, message in messages.items())
    return joint


def _join(sum_so_far: object, value: object) -> object:
    """Counts are added up; of anything else the first is taken."""
    if isinstance(value, int) and isinstance(sum_so_far, int) and not isinstance(value, bool):
        return sum_so_far + value
    return value if sum_so_far is None else sum_so_far
