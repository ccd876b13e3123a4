"""The documents of worker and router are made from the tables of their routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from diptych.common_config import Program, Role, publish, resolve
from diptych.common_config.testing import reset_for_tests
from diptych.httpserver.access import Access
from diptych.httpserver.endpoints import Endpoint, kinds
from diptych.httpserver.openapi import describe
from diptych.router.app import RouterServer
from diptych.router.openapi import joined_document
from diptych.router.routes import ENDPOINTS
from diptych.server.routes import ROUTES as WORKER_ROUTES

WORKER = describe("worker", [endpoint for endpoint, _ in WORKER_ROUTES])


def documented(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(m.upper(), path) for path, operations in document["paths"].items() for m in operations}


def served(app: web.Application) -> set[tuple[str, str]]:
    """HEAD is GET's."""
    return {(r.method, r.resource.canonical) for r in app.router.routes() if r.resource} - {
        (r.method, r.resource.canonical) for r in app.router.routes() if r.resource and r.method == "HEAD"
    }


@pytest.fixture
def router_app() -> Iterator[web.Application]:
    reset_for_tests()
    publish(resolve(Program.ROUTER, flags={}, env={}), role=Role.ROUTER)
    yield RouterServer().app()
    reset_for_tests()


async def test_the_routers_document_has_every_route_and_no_other_also_without_workers(
    router_app: web.Application,
) -> None:
    async with TestClient(TestServer(router_app)) as client:
        document = await (await client.get("/openapi.json")).json()
    assert documented(document) == served(router_app)
    assert ("DELETE", "/workers/{worker_id}") in documented(document)


def test_the_router_has_every_route_of_a_worker() -> None:
    """A client that moves from one worker to a pair finds what it used."""
    of_router = {(e.method, e.template) for e in ENDPOINTS}
    assert {(e.method, e.template) for e, _ in WORKER_ROUTES} <= of_router


def test_a_workers_document_says_what_relayed_routes_take_and_answer() -> None:
    alone, joined = joined_document(None), joined_document(WORKER)
    chat = joined["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"] == WORKER["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert "ChatCompletion" in json.dumps(chat["responses"])
    assert joined["components"]["schemas"]["ChatRequest"] == WORKER["components"]["schemas"]["ChatRequest"]
    assert documented(joined) == documented(alone)
    pause = joined["paths"]["/pause_generation"]["post"]
    assert "PauseRequest" in json.dumps(pause["requestBody"])
    assert "JointAnswer" in json.dumps(pause["responses"]), "that answer is the router's own"
    assert joined["paths"]["/server_info"] == alone["paths"]["/server_info"]


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"paths": None, "components": {"schemas": []}},
        {"paths": {"/generate": {"post": {"requestBody": "none", "responses": 3}}}},
        {"components": {"schemas": {"Error": {"type": "string"}}}},
    ],
)
def test_what_a_strange_worker_says_does_no_harm(said: dict[str, Any]) -> None:
    assert joined_document(said) == joined_document(None)


def test_every_reference_leads_somewhere() -> None:
    for document in (WORKER, joined_document(None), joined_document(WORKER)):
        text = json.dumps(document)
        for name in {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
            assert name in document["components"]["schemas"]


def test_operations_have_names_of_their_own() -> None:
    for document in (WORKER, joined_document(None)):
        ids = [o["operationId"] for operations in document["paths"].values() for o in operations.values()]
        assert len(set(ids)) == len(ids)


def test_access_is_told_by_path_or_by_method_where_methods_differ() -> None:
    table = [
        Endpoint("GET", "/a/{rest:.+}", Access.READING, ""),
        Endpoint("POST", "/a/{rest:.+}", Access.ADMIN, ""),
        Endpoint("GET", "/b", Access.OPEN, ""),
    ]
    assert kinds(table) == {
        "GET /a/{rest}": Access.READING,
        "HEAD /a/{rest}": Access.READING,
        "POST /a/{rest}": Access.ADMIN,
        "/b": Access.OPEN,
    }
