"""Which key opens which kind of route, and that every route has a kind."""

from __future__ import annotations

import ast
import hmac
import inspect

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.typedefs import Handler

from diptych.common_config import Program, Role, override_config, publish, resolve
from diptych.common_config.testing import reset_for_tests
from diptych.httpserver import access
from diptych.httpserver.access import Access, Refusal, access_of, own_authorization, refusal
from diptych.router.app import RouterServer
from diptych.router.routes import KINDS as ROUTER_ROUTES
from diptych.server.middleware import KINDS as WORKER_ROUTES

KEY, ADMIN = "ordinary-key", "admin-key"
KEYS = {
    "none": {},
    "key": {"api_key": KEY},
    "admin": {"admin_api_key": ADMIN},
    "both": {"api_key": KEY, "admin_api_key": ADMIN},
}
OK, NO, FORBIDDEN = None, Refusal.UNKNOWN, Refusal.NOT_ADMIN

TABLE = [
    # which keys are set, kind, → without a key, with the API key, with the admin key
    ("none", Access.OPEN, OK, OK, OK),
    ("none", Access.READING, OK, OK, OK),
    ("none", Access.ADMIN, OK, OK, OK),
    ("key", Access.OPEN, OK, OK, OK),
    ("key", Access.READING, NO, OK, NO),
    ("key", Access.GENERATING, NO, OK, NO),
    ("key", Access.ADMIN, NO, OK, NO),
    ("admin", Access.OPEN, OK, OK, OK),
    ("admin", Access.GENERATING, OK, OK, OK),
    ("admin", Access.ADMIN, NO, NO, OK),
    ("both", Access.OPEN, OK, OK, OK),
    ("both", Access.READING, NO, OK, OK),
    ("both", Access.GENERATING, NO, OK, OK),
    ("both", Access.ADMIN, NO, FORBIDDEN, OK),
]


@pytest.mark.parametrize(("keys", "kind", "bare", "with_key", "with_admin"), TABLE)
def test_which_key_opens_what(
    keys: str, kind: Access, bare: Refusal | None, with_key: Refusal | None, with_admin: Refusal | None
) -> None:
    with override_config(**KEYS[keys]):
        assert refusal(kind, "") is bare
        assert refusal(kind, f"Bearer {KEY}") is with_key
        assert refusal(kind, f"Bearer {ADMIN}") is with_admin
        assert refusal(kind, f"bearer  {ADMIN} ") is with_admin


@pytest.mark.parametrize(
    "header",
    [
        KEY,
        f"Basic {KEY}",
        "Bearer",
        "Bearer ",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer \udcff",
        f"Bearer x {KEY}",
    ],
)
def test_nothing_else_opens_a_route(header: str) -> None:
    with override_config(api_key=KEY):
        assert refusal(Access.READING, header) is Refusal.UNKNOWN


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare_digest = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return compare_digest(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    with override_config(api_key=KEY, admin_api_key=ADMIN):
        assert refusal(Access.ADMIN, f"Bearer {KEY}") is Refusal.NOT_ADMIN
    assert sorted(compared) == sorted([KEY.encode(), ADMIN.encode()])
    tree = ast.parse(inspect.getsource(access))
    compares = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    names = {n.id for compare in compares for n in ast.walk(compare) if isinstance(n, ast.Name)}
    assert "given" not in names, "what was given is compared in no other way"


@pytest.mark.parametrize(
    ("keys", "reading", "admin"),
    [
        ("none", None, None),
        ("key", KEY, KEY),
        ("admin", None, ADMIN),
        ("both", KEY, ADMIN),
    ],
)
def test_own_calls_carry_no_more_than_they_need(keys: str, reading: str | None, admin: str | None) -> None:
    with override_config(**KEYS[keys]):
        for kind, key in ((Access.READING, reading), (Access.GENERATING, reading), (Access.ADMIN, admin)):
            assert own_authorization(kind) == (None if key is None else f"Bearer {key}")


def unclassified(app: web.Application, kinds: dict[str, Access]) -> list[str]:
    """Routes that take more than GET and are in no table, neither by their path nor with their method."""
    return [
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None
        and route.method not in ("GET", "HEAD")
        and f"{route.method} {route.resource.canonical}" not in kinds
        and route.resource.canonical not in kinds
    ]


async def test_every_route_of_the_router_that_takes_more_than_get_has_a_kind() -> None:
    reset_for_tests()
    flags = {"prefill": [["http://127.0.0.1:1", "1"]], "decode": [["http://127.0.0.1:2"]]}
    publish(resolve(Program.ROUTER, flags=flags, env={}), role=Role.ROUTER)
    try:
        app = RouterServer().app()
        assert unclassified(app, ROUTER_ROUTES) == []
        known = {resource.canonical for resource in app.router.resources()}
        assert {path.partition(" ")[2] or path for path in ROUTER_ROUTES} <= known
    finally:
        reset_for_tests()


async def test_a_route_that_nobody_classified_is_closed_unless_it_reads() -> None:
    app = web.Application()

    async def handler(_: web.Request) -> web.Response:
        return web.Response()

    app.router.add_post("/new/{name:.+}", handler)
    app.router.add_get("/new/{name:.+}", handler)
    kinds: list[Access] = []

    @web.middleware
    async def look(request: web.Request, handler: Handler) -> web.StreamResponse:
        kinds.append(access_of({}, request))
        return await handler(request)

    app.middlewares.append(look)
    async with TestClient(TestServer(app)) as client:
        await client.post("/new/x")
        await client.get("/new/x")
        assert (await client.post("/nothing")).status == 404
    assert kinds == [Access.ADMIN, Access.READING, Access.READING]
    assert unclassified(app, {}) == ["POST /new/{name}"]
    assert unclassified(app, {"POST /new/{name}": Access.READING}) == []


def test_both_tables_say_the_same_of_what_both_have() -> None:
    shared = ROUTER_ROUTES.keys() & WORKER_ROUTES.keys()
    assert {path: ROUTER_ROUTES[path] for path in shared} == {path: WORKER_ROUTES[path] for path in shared}
