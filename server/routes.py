"""Every route of a worker: what it takes, what it answers, who may use it and what handles it."""

from __future__ import annotations

from typing import TypedDict

from aiohttp.typedefs import Handler

from diptych.engine.faults import FaultChange
from diptych.httpserver.access import Access
from diptych.httpserver.endpoints import EMPTY, EVENTS, JSON, TEXT, Answer, Endpoint
from diptych.server import answer_types as types
from diptych.server import control, faults, info, native
from diptych.server.chat import chat_completions
from diptych.server.completions import completions
from diptych.server.generate import generate
from diptych.server.requests import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from diptych.server.responses import responses
from diptych.server.responses_request import ResponsesRequest
from diptych.server.update_config import update_config
from diptych.server.weights import UpdateWeightsRequest, update_weights


class ConfigChanges(TypedDict, total=False):
    """What `update_config` takes; null undoes a change."""

    weight_version: str | None
    served_model_name: str | None
    log_level: str | None


def _json(kind: object) -> tuple[Answer]:
    return (Answer("application/json", kind),)


def _generates(path: str, summary: str, body: object, answer: object) -> Endpoint:
    answers = (Answer("application/json", answer), EVENTS)
    return Endpoint("POST", path, Access.GENERATING, summary, body, answers=answers)


def _reads(path: str, summary: str, answers: tuple[Answer, ...] = (JSON,)) -> Endpoint:
    return Endpoint("GET", path, Access.READING, summary, answers=answers)


def _open(path: str, summary: str, answer: Answer) -> Endpoint:
    return Endpoint("GET", path, Access.OPEN, summary, answers=(answer,))


def _orders(path: str, summary: str, body: object, answer: object, *, required: bool = True) -> Endpoint:
    return Endpoint("POST", path, Access.ADMIN, summary, body, required, _json(answer))


ROUTES: tuple[tuple[Endpoint, Handler], ...] = (
    (
        _generates("/v1/chat/completions", "Answer a conversation", ChatRequest, types.ChatCompletion),
        chat_completions,
    ),
    (_generates("/v1/completions", "Continue a text", CompletionRequest, types.Completion), completions),
    (_generates("/v1/responses", "Answer an input", ResponsesRequest, types.Response), responses),
    (
        _generates(
            "/generate",
            "Continue texts or token ids",
            GenerateRequest,
            types.Generated | list[types.Generated],
        ),
        generate,
    ),
    (_reads("/v1/models", "The model that is served", _json(types.ModelList)), info.models),
    (_reads("/v1/models/{name:.+}", "One model", _json(types.ModelObject)), info.model),
    (_open("/health", "Whether requests are taken", EMPTY), control.health),
    (_reads("/health_generate", "Whether the scheduler works", (EMPTY,)), control.health_generate),
    (_reads("/server_info", "Settings and state"), info.server_info),
    (_reads("/get_server_info", "The same as /server_info"), info.server_info),
    (_reads("/model_info", "Facts about the model", _json(types.ModelInfo)), info.model_info),
    (_reads("/get_model_info", "The same as /model_info", _json(types.ModelInfo)), info.model_info),
    (_reads("/get_load", "Requests and tokens in use", _json(list[types.Load])), info.load),
    (_open("/metrics", "Prometheus metrics", TEXT), info.metrics),
    (
        Endpoint("GET", "/flush_cache", Access.ADMIN, "Empty the prefix cache", answers=_json(types.Done)),
        control.flush_cache,
    ),
    (_orders("/flush_cache", "Empty the prefix cache", None, types.Done), control.flush_cache),
    (
        _orders("/abort_request", "End requests by id, or all", AbortRequest, types.Aborted),
        control.abort_request,
    ),
    (_orders("/update_config", "Change settings", ConfigChanges, ConfigChanges), update_config),
    (
        _orders("/update_weights_from_disk", "Load other weights", UpdateWeightsRequest, types.Done),
        update_weights,
    ),
    (
        _orders("/pause_generation", "Compute nothing", native.PauseRequest, types.Paused, required=False),
        native.pause_generation,
    ),
    (_orders("/continue_generation", "Compute again", None, types.Paused), native.continue_generation),
    (
        _orders("/start_profile", "Record the scheduler", native.ProfileRequest, types.Trace, required=False),
        native.start_profile,
    ),
    (_orders("/stop_profile", "Write the recording", None, types.Trace), native.stop_profile),
    (
        Endpoint(
            "POST",
            "/tokenize",
            Access.READING,
            "Text or messages to token ids",
            TokenizeRequest,
            answers=_json(types.Tokens),
        ),
        control.tokenize,
    ),
    (
        Endpoint(
            "POST",
            "/detokenize",
            Access.READING,
            "Token ids to text",
            DetokenizeRequest,
            answers=_json(types.Detokenized),
        ),
        control.detokenize,
    ),
)

FAULT_ROUTES: tuple[tuple[Endpoint, Handler], ...] = (
    (
        Endpoint("GET", "/faults", Access.ADMIN, "What goes wrong on purpose"),
        faults.show_faults,
    ),
    (
        Endpoint("POST", "/faults", Access.ADMIN, "Make things go wrong on purpose", FaultChange),
        faults.change_faults,
    ),
)
"""With `--enable-fault-injection` alone."""
