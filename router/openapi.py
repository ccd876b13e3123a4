"""The router's OpenAPI document: its own, and what the workers' document says of the routes that are theirs
to judge."""

from __future__ import annotations

import functools
from typing import Any

from diptych.httpserver.endpoints import Endpoint
from diptych.httpserver.openapi import describe
from diptych.router.routes import ENDPOINTS, ROUTES

Document = dict[str, Any]

RELAYED = (*ROUTES["generate"], *ROUTES["from_decode"])
"""The client gets a worker's answer as it is."""
JOINT = ROUTES["to_all_workers"]
"""Every worker gets the body, the answer is the router's."""


@functools.cache
def own_document() -> Document:
    """Without any worker: bodies of relayed routes are objects of any kind. Not to be changed."""
    return describe("Diptych router", ENDPOINTS)


def joined_document(worker: Document | None) -> Document:
    """With what a worker's document, if there is one, says of relayed routes. A worker that isn't one of ours
    may say less, or nothing."""
    own = own_document()
    if worker is None:
        return own
    paths: Document = {path: dict(operations) for path, operations in own["paths"].items()}
    for endpoint in (*RELAYED, *JOINT):
        told = _operation(worker, endpoint)
        taken = ("requestBody", "responses") if endpoint in RELAYED else ("requestBody",)
        operations, method = paths[endpoint.template], endpoint.method.lower()
        operations[method] = operations[method] | {
            name: told[name] for name in taken if isinstance(told.get(name), dict)
        }
    schemas = _inside(worker, "components", "schemas") | own["components"]["schemas"]
    return own | {"paths": paths, "components": own["components"] | {"schemas": schemas}}


def _operation(document: Document, endpoint: Endpoint) -> Document:
    return _inside(document, "paths", endpoint.template, endpoint.method.lower())


def _inside(document: Document, *names: str) -> Document:
    """The object found by following the names; empty if there is none."""
    found: object = document
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
