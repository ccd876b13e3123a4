"""`POST /update_config`: what changes while a worker runs, and how it changes back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from .conftest import MODEL, Client, Worker, chat, say, wait_until

ROUTE = "/update_config"
LAUNCHED = {"weight_version": "v1", "served_model_name": "asked", "log_level": "warning"}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(
        "colocated",
        *("--served-model-name", "asked", "--weight-version", "v1"),
        *("--log-level", "warning", "--api-key", "s3cret"),
    )
    yield worker
    assert worker.stop() == 0
    assert "s3cret" not in worker.stderr


@pytest.fixture
async def client(worker: Worker) -> AsyncIterator[Client]:
    """With the key; what a test changed is undone."""
    key = {"Authorization": "Bearer s3cret"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), headers=key) as session:
        client = Client(worker.url, session)
        yield client
        assert await client.post(ROUTE, dict.fromkeys(LAUNCHED)) == (200, LAUNCHED)


async def test_a_new_name_is_the_one_that_is_listed_answered_and_accepted(client: Client):
    assert await client.post(ROUTE, {"served_model_name": "new/name"}) == (
        200,
        LAUNCHED | {"served_model_name": "new/name"},
    )
    assert [entry["id"] for entry in (await client.get("/v1/models"))[1]["data"]] == ["new/name"]
    assert (await client.get("/v1/models/new/name"))[0] == 200
    assert (await client.get("/v1/models/asked"))[0] == 404
    for path, body in (("/v1/chat/completions", chat("x")), ("/v1/completions", {"prompt": say("x")})):
        for accepted in ({}, {"model": "new/name"}, {"model": MODEL}):
            status, answer = await client.post(path, body | accepted)
            assert (status, answer["model"]) == (200, "new/name")
        assert {event["model"] for event in await client.events(path, body)} == {"new/name"}
        status, answer = await client.post(path, body | {"model": "asked"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "'new/name' is" in answer["error"]["message"]
    assert (await client.post("/tokenize", {"prompt": "x", "model": "asked"}))[0] == 404
    for path in ("/server_info", "/model_info"):
        assert (await client.get(path))[1]["served_model_name"] == "new/name"

    assert await client.post(ROUTE, {"served_model_name": None}) == (200, LAUNCHED)
    status, answer = await client.post("/v1/chat/completions", chat("x", model="asked"))
    assert (status, answer["model"]) == (200, "asked")
    assert (await client.post("/v1/chat/completions", chat("x", model="new/name")))[0] == 404


async def test_an_answer_keeps_the_name_and_version_that_it_began_with(client: Client):
    body = {"text": say("a b c d e", delay=0.05), "stream": True}
    async with client.session.post(client.url + "/generate", json=body) as stream:
        await stream.content.readline()
        assert (await client.post(ROUTE, {"weight_version": "v2"}))[0] == 200
        rest = (await stream.read()).decode()
    assert '"weight_version":"v1"' in rest
    assert '"weight_version":"v2"' not in rest
    _, answer = await client.post("/generate", {"text": say("x")})
    assert answer["meta_info"]["weight_version"] == "v2"
    for path in ("/server_info", "/model_info"):
        assert (await client.get(path))[1]["weight_version"] == "v2"


async def test_the_log_level_is_that_of_both_processes(client: Client, worker: Worker):
    await client.post(ROUTE, {"weight_version": "never logged"})
    await client.post(ROUTE, {"log_level": "info"})
    await client.post(ROUTE, {"weight_version": "logged"})
    await client.post(ROUTE, {"log_level": None})
    await client.post(ROUTE, {"weight_version": "not logged any more"})
    assert wait_until(lambda: "sets weight_version = 'logged' for this engine" in worker.stderr)
    levels = [message["level"] for message in await client.received() if message["type"] == "log_level"]
    assert levels[-2:] == ["info", "warning"]
    assert "never logged" not in worker.stderr
    assert "not logged any more" not in worker.stderr


async def test_changes_are_shown_with_their_source_and_touch_neither_record_nor_bags(client: Client):
    _, before = await client.get("/server_info")
    await client.post(ROUTE, {"weight_version": "v2", "served_model_name": "new"})
    _, info = await client.get("/server_info")
    assert info["engine_overlay"]["values"] == {"weight_version": "v2", "served_model_name": "new"}
    assert info["engine_overlay"]["updates"][-2:] == [
        {"source": "POST /update_config", "name": "weight_version", "value": "v2"},
        {"source": "POST /update_config", "name": "served_model_name", "value": "new"},
    ]
    for part in ("record", "provenance", "frontend"):
        assert info[part] == before[part]
    assert info["scheduler"]["bags"] == before["scheduler"]["bags"]
    await client.post(ROUTE, {"weight_version": None})
    _, info = await client.get("/server_info")
    assert info["engine_overlay"]["values"] == {"served_model_name": "new"}
    assert info["engine_overlay"]["updates"][-1] == {
        "source": "POST /update_config",
        "name": "weight_version",
        "withdrawn": True,
    }


async def test_asking_for_nothing_says_what_is_in_effect(client: Client):
    before = (await client.get("/server_info"))[1]["engine_overlay"]["updates"]
    assert await client.post(ROUTE, {}) == (200, LAUNCHED)
    assert await client.post(ROUTE, dict.fromkeys(LAUNCHED)) == (200, LAUNCHED)
    assert (await client.get("/server_info"))[1]["engine_overlay"]["updates"] == before


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"weight_versoin": "1"}, "weight_versoin", "weight_version, served_model_name, log_level can"),
        ({"api_key": "0ther"}, "api_key", "weight_version, served_model_name, log_level can"),
        ({"page_size": 32}, "page_size", "can't be changed"),
        ({"weight_version": 7}, "weight_version", "7 is not text"),
        ({"weight_version": ["7"]}, "weight_version", "is not text"),
        ({"served_model_name": ""}, "served_model_name", "empty"),
        ({"served_model_name": " x"}, "served_model_name", "spaces"),
        ({"served_model_name": "a\nb"}, "served_model_name", "can't be printed"),
        ({"log_level": "loud"}, "log_level", "one of debug, info, warning, error"),
        ({"log_level": "DEBUG"}, "log_level", "one of debug, info, warning, error"),
        ({"log_level": True}, "log_level", "one of debug, info, warning, error"),
        (["weight_version"], None, "object"),
        (b"{", None, "JSON"),
    ],
)
async def test_what_cannot_be_is_a_400_and_nothing_changes(
    client: Client, body, param: str | None, said: str
):
    received = len(await client.received())
    if isinstance(body, dict):  # good ones before and after it
        body = {"weight_version": "good", "log_level": "debug"} | body | {"served_model_name": "x"} | body
    status, answer = await client.post(ROUTE, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["param"] == param
    assert said in answer["error"]["message"]
    assert "0ther" not in answer["error"]["message"]
    assert await client.post(ROUTE, {}) == (200, LAUNCHED)
    assert len(await client.received()) == received


async def test_only_post_is_answered_and_only_with_the_key(client: Client, worker: Worker, session):
    assert (await client.get(ROUTE))[0] == 405
    stranger = Client(worker.url, session)
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        status, answer = await stranger.post(ROUTE, {"served_model_name": "taken"}, headers=headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert await client.post(ROUTE, {}) == (200, LAUNCHED)
