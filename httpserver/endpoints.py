"""One declaration for each route: it adds the route, says who may use it, and describes it in the OpenAPI
document, so that none of the three can be forgotten."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from diptych.httpserver.access import Access

_PATTERN = re.compile(r"\{(\w+):[^{}]*\}")
"""A part of a path with the expression that it matches."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One form of a successful answer."""

    media_type: str | None
    """None: no body."""
    data: object = None
    """The type of the JSON, in msgspec's terms; None: any."""


JSON = Answer("application/json")
EVENTS = Answer("text/event-stream")
TEXT = Answer("text/plain")
EMPTY = Answer(None)


@dataclass(frozen=True, slots=True)
class Query:
    """A parameter behind the question mark; all are optional texts."""

    name: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What one method of one path takes and answers. Every error is an `httpserver.openapi.Error`."""

    method: str
    path: str
    """As aiohttp writes it: `/v1/models/{name:.+}`."""
    access: Access
    summary: str
    body: object = None
    """The type of the JSON, in msgspec's terms; None: no body is read."""
    body_required: bool = True
    answers: tuple[Answer, ...] = (JSON,)
    statuses: tuple[int, ...] = (200,)
    queries: tuple[Query, ...] = ()

    @property
    def template(self) -> str:
        """The path as OpenAPI and aiohttp's `resource.canonical` write it: `/v1/models/{name}`."""
        return _PATTERN.sub(r"{\1}", self.path)

    @property
    def parts(self) -> list[str]:
        """Names of the path's variable parts."""
        return re.findall(r"\{(\w+)\}", self.template)


DOCUMENT = Endpoint("GET", "/openapi.json", Access.READING, "This document")


def add_route(app: web.Application, endpoint: Endpoint, handler: Handler) -> None:
    """GET routes answer HEAD too."""
    if endpoint.method == "GET":
        app.router.add_get(endpoint.path, handler)
    else:
        app.router.add_route(endpoint.method, endpoint.path, handler)


def kinds(endpoints: Iterable[Endpoint]) -> dict[str, Access]:
    """For `access_of`: by path, or by method and path where the methods of one path differ."""
    of_path: dict[str, dict[str, Access]] = {}
    for endpoint in endpoints:
        methods = of_path.setdefault(endpoint.template, {})
        methods[endpoint.method] = endpoint.access
        if endpoint.method == "GET":
            methods["HEAD"] = endpoint.access
    found: dict[str, Access] = {}
    for path, methods in of_path.items():
        if len(set(methods.values())) == 1:
            found[path] = next(iter(methods.values()))
        else:
            found |= {f"{method} {path}": access for method, access in methods.items()}
    return found
