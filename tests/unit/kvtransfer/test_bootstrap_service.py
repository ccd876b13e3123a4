"""Ranks register, peers look up; nothing a stranger sends breaks the service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer

from diptych.kvtransfer.bootstrap.route import RankRoute, Route
from diptych.kvtransfer.bootstrap.service import make_bootstrap_app
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.wire import PROTOCOL_VERSION

from .conftest import make_fingerprint

Client = TestClient


def rank(index: int, world_size: int = 1, worker_id: str = "w1", **changes: object) -> bytes:
    values: dict[str, object] = {
        "version": PROTOCOL_VERSION,
        "worker_id": worker_id,
        "rank": index,
        "world_size": world_size,
        "identity": Identity.current(),
        "control_address": f"tcp://h:{1000 + index}",
        "fingerprint": make_fingerprint(),
        "backend": "fake",
    }
    return msgspec.json.encode(RankRoute(**(values | changes)))  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async with TestClient(TestServer(make_bootstrap_app())) as made:
        yield made


async def put(client: Client, body: bytes) -> tuple[int, str]:
    answer = await client.put("/route", data=body)
    return answer.status, await answer.text()


async def test_no_route_before_every_distinct_rank_has_registered(client: Client) -> None:
    answer = await client.get("/route")
    assert (answer.status, await answer.json()) == (503, {"error": "no rank has registered yet"})
    assert (await client.get("/health")).status == 503
    await put(client, rank(0, 2))
    await put(client, rank(0, 2))
    answer = await client.get("/route")
    assert (answer.status, await answer.json()) == (503, {"error": "1 of 2 ranks have registered"})
    await put(client, rank(1, 2))
    answer = await client.get("/route")
    assert answer.status == 200
    route = msgspec.json.decode(await answer.read(), type=Route)
    assert [r.control_address for r in route.ranks] == ["tcp://h:1000", "tcp://h:1001"]
    assert route.fingerprint == make_fingerprint()
    assert (await client.get("/health")).status == 200


async def test_answer_leads_with_the_protocol_version(client: Client) -> None:
    await put(client, rank(0))
    assert (await (await client.get("/route")).text()).startswith(f'{{"version":{PROTOCOL_VERSION},')


async def test_new_worker_start_replaces_the_old_one_wholesale(client: Client) -> None:
    await put(client, rank(0, 2))
    await put(client, rank(1, 2))
    await put(client, rank(0, 2, worker_id="w2"))
    assert (await client.get("/route")).status == 503
    await put(client, rank(1, 2, worker_id="w2"))
    assert (await (await client.get("/route")).json())["worker_id"] == "w2"


async def test_what_the_scheduler_published_is_passed_on(client: Client) -> None:
    published = {"schedule": {"page_size": 4}, "disagg": {"transfer_timeout": 2.5}}
    await put(client, rank(0, published=published))
    assert (await (await client.get("/route")).json())["published"] == published


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"not json", ""),
        (b"", ""),
        (b"\xff\xfe", ""),
        (b"[" * 50_000, ""),
        (b"{}", "version"),
        (rank(2, 2), "rank"),
        (rank(-1), "rank"),
        (rank(0, 0), "world_size"),
        (rank(0, 10**9), "world_size"),
        (rank(0, worker_id=""), "worker_id"),
        (rank(0, control_address="ipc://x"), "control_address"),
        (rank(0, version=PROTOCOL_VERSION + 1), "version"),
        (rank(0).replace(b'"rank":0', b'"rank":"zero"'), "rank"),
        (rank(0).replace(b'"rank":0', b'"rank":0,"more":1'), "more"),
    ],
)
async def test_bad_registration_gets_a_400_that_says_what_is_wrong(
    client: Client, body: bytes, names: str
) -> None:
    status, text = await put(client, body)
    assert status == 400
    assert names in msgspec.json.decode(text)["error"]
    assert (await client.get("/route")).status == 503


async def test_contradicting_rank_gets_a_409_and_changes_nothing(client: Client) -> None:
    await put(client, rank(0, 2))
    assert (await put(client, rank(1, 3)))[0] == 409
    assert (await put(client, rank(1, 2, fingerprint=make_fingerprint(page_size=8))))[0] == 409
    assert (await put(client, rank(1, 2)))[0] == 200


async def test_oversized_body_gets_a_413(client: Client) -> None:
    assert (await put(client, b"x" * (2 << 20)))[0] == 413
    assert (await put(client, rank(0)))[0] == 200
