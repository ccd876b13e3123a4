"""Every route of the router by the name of its handler: what it takes and answers, and who may use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from diptych.httpserver.access import Access
from diptych.httpserver.endpoints import DOCUMENT, EVENTS, JSON, TEXT, Answer, Endpoint, Query, kinds
from diptych.router.worker_requests import NewWorker, WorkerChanges

OF_THE_WORKERS = dict[str, Any]
"""A body that the workers judge: their document says what it is."""


class JointAnswer(msgspec.Struct, kw_only=True):
    """What every worker did, and the fields that a single one would have answered."""

    success: bool
    workers: list[dict[str, Any]]


class WorkerChanged(msgspec.Struct, kw_only=True):
    success: bool
    status: str
    message: str
    worker_id: str
    url: str
    location: str
    worker: dict[str, Any]


_JOINT = (Answer("application/json", JointAnswer),)
_CHANGED = (Answer("application/json", WorkerChanged),)
_ONE = "/workers/{worker_id:.+}"


def _generates(path: str, summary: str) -> Endpoint:
    return Endpoint("POST", path, Access.GENERATING, summary, OF_THE_WORKERS, answers=(JSON, EVENTS))


def _reads(path: str, summary: str, body: object = None) -> Endpoint:
    return Endpoint("GET" if body is None else "POST", path, Access.READING, summary, body)


def _orders(path: str, summary: str, body: object = None, *, required: bool = True) -> Endpoint:
    return Endpoint("POST", path, Access.ADMIN, f"{summary}, at every worker", body, required, _JOINT)


ROUTES: Mapping[str, tuple[Endpoint, ...]] = {
    "generate": (
        _generates("/v1/chat/completions", "Answer a conversation"),
        _generates("/v1/completions", "Continue a text"),
        _generates("/v1/responses", "Answer an input"),
        _generates("/generate", "Continue texts or token ids"),
    ),
    "from_decode": (
        _reads("/model_info", "Facts about the model"),
        _reads("/get_model_info", "The same as /model_info"),
        _reads("/tokenize", "Text or messages to token ids", OF_THE_WORKERS),
        _reads("/detokenize", "Token ids to text", OF_THE_WORKERS),
    ),
    "to_all_workers": (
        Endpoint(
            "GET", "/flush_cache", Access.ADMIN, "Empty the prefix cache, at every worker", answers=_JOINT
        ),
        _orders("/flush_cache", "Empty the prefix cache"),
        _orders("/abort_request", "End requests by id, or all", OF_THE_WORKERS),
        _orders("/pause_generation", "Compute nothing", OF_THE_WORKERS, required=False),
        _orders("/continue_generation", "Compute again"),
        _orders("/update_weights_from_disk", "Load other weights", OF_THE_WORKERS),
        _orders("/update_config", "Change settings", OF_THE_WORKERS),
        _orders("/start_profile", "Record the scheduler", OF_THE_WORKERS, required=False),
        _orders("/stop_profile", "Write the recording"),
    ),
    "health": (Endpoint("GET", "/health", Access.OPEN, "Whether a healthy pair of workers is there"),),
    "health_generate": (_reads("/health_generate", "One token through a pair"),),
    "list_models": (_reads("/v1/models", "The models that both sides serve"),),
    "show_model": (_reads("/v1/models/{name:.+}", "One model"),),
    "server_info": (
        _reads("/server_info", "Settings, and the workers"),
        _reads("/get_server_info", "The same as /server_info"),
    ),
    "get_load": (_reads("/get_load", "Requests and tokens in use, of every worker"),),
    "show_metrics": (
        Endpoint(
            "GET",
            "/metrics",
            Access.OPEN,
            "Prometheus metrics of the router and its workers",
            answers=(TEXT,),
        ),
    ),
    "show_engine_metrics": (
        Endpoint("GET", "/engine_metrics", Access.READING, "Those of the workers alone", answers=(TEXT,)),
    ),
    "list_workers": (_reads("/workers", "The workers"),),
    "add_worker": (
        Endpoint(
            "POST",
            "/workers",
            Access.ADMIN,
            "Add a worker, or renew its lease",
            NewWorker,
            answers=_CHANGED,
            statuses=(200, 202),
        ),
    ),
    "show_worker": (_reads(_ONE, "One worker, by id or URL"),),
    "remove_worker": (
        Endpoint(
            "DELETE",
            _ONE,
            Access.ADMIN,
            "Give a worker no more requests",
            answers=_CHANGED,
            statuses=(202,),
            queries=(Query("instance_id", "Only if it is still this process."),),
        ),
    ),
    "change_worker": tuple(
        Endpoint(method, _ONE, Access.ADMIN, "Change a worker", WorkerChanges, answers=_CHANGED)
        for method in ("PUT", "PATCH")
    ),
    "show_document": (DOCUMENT,),
}

ENDPOINTS = tuple(endpoint for endpoints in ROUTES.values() for endpoint in endpoints)

KINDS = kinds(ENDPOINTS)
"""Who may use which route."""

NOTHING_TO_DO = {"/stop_profile": 409}
"""Calls to all workers that need not find all of them in the same state, and the status of one that had
nothing to do: a recording of so many steps ends by itself, on one side before the other."""

SLOW_JOINT = ("/update_weights_from_disk", "/stop_profile")
"""Calls to all workers that may take as long as a request."""
