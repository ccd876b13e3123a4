"""The request log and the histograms: what happened to each request, told once."""

from __future__ import annotations

import asyncio
import datetime
import io
import json
import logging

import pytest

from diptych.router import access_log

FIELDS = {
    *("time", "id", "client", "method", "route", "path", "status", "prefill", "decode", "attempts", "ttft"),
    *("duration", "bytes", "outcome", "error"),
}


@pytest.fixture
def log(monkeypatch):
    """What `--log-requests` writes."""
    written = io.StringIO()
    logger = access_log.access_logger
    before = logger.handlers, logger.propagate, logger.level
    access_log.set_up()
    logger.handlers[0].setStream(written)
    yield written
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def lines(log):
    entries = [json.loads(line) for line in log.getvalue().splitlines()]
    assert all(set(entry) == FIELDS for entry in entries)
    return entries


async def test_one_line_of_json_for_each_request_with_what_happened_to_it(make_worker, kit, log):
    prefill = await make_worker(kit.answers())
    refusing, serving = (
        await make_worker(kit.fails(503, "full")),
        await make_worker(kit.streams([b"x" * 5, b"yz"])),
    )
    flags = ("--log-requests", "--policy", "round_robin", "--log-level", "error")
    async with kit.router([prefill], [refusing, serving], *flags) as router:
        async with router.post(headers={"X-Request-Id": 'a "quoted" id'}) as response:
            assert await response.read() == b"xxxxxyz"
        async with router.get("/v1/models/no\nsuch") as response:
            assert response.status in (404, 503)
        await kit.eventually(lambda: len(lines(log)) >= 2)
    relayed, refused = lines(log)
    assert relayed == relayed | {
        "id": 'a "quoted" id',
        "client": "127.0.0.1",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "prefill": prefill.url,
        "decode": serving.url,
        "attempts": 2,
        "bytes": 7,
        "outcome": "ok",
        "error": None,
    }
    assert 0 < relayed["ttft"] <= relayed["duration"]
    assert datetime.datetime.fromisoformat(relayed["time"]).tzinfo is not None
    assert refused == refused | {"route": "/v1/models/{name}", "attempts": 0, "prefill": None, "ttft": None}
    assert refused["bytes"] > 0
    assert refused["outcome"] == "error"
    assert "no/such" in refused["error"] or "no decode worker" in refused["error"]


async def test_a_client_that_left_is_logged_too(make_worker, kit, log):
    prefill = await make_worker(kit.answers())
    decode = await make_worker(kit.streams([kit.event(1)], then=kit.hangs))
    async with kit.router([prefill], [decode], "--log-requests") as router:
        async with router.post() as response:
            await response.content.readany()
        await kit.eventually(lambda: lines(log))
    assert lines(log)[0] == lines(log)[0] | {"status": 499, "bytes": len(kit.event(1)), "attempts": 1} | {
        "outcome": "left",
        "error": None,
    }


async def test_an_answer_that_broke_after_its_head_is_told_from_a_whole_one(make_worker, kit, log):
    prefill = await make_worker(kit.answers())
    decode = await make_worker(kit.streams([kit.event(1)], then=kit.breaks))
    async with kit.router([prefill], [decode], "--log-requests") as router:
        async with router.post() as response:
            await response.read()
        decode.script = kit.streams([kit.event(1)])
        async with router.post() as response:
            await response.read()
        await kit.eventually(lambda: len(lines(log)) == 2)
        first, second = lines(log)
        broken = 'diptych_router_broken_answers_total{code="worker_failed",route="/v1/completions"}'
        assert await router.metric(broken) == 1
    assert (first["status"], first["outcome"], second["outcome"]) == (200, "broken", "ok")
    assert decode.url in first["error"]
    assert second["error"] is None


async def test_nothing_is_logged_unless_asked(make_worker, kit, log):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with kit.router([prefill], [decode]) as router, router.post() as response:
        assert response.status == 200
    assert lines(log) == []
    assert logging.getLogger("diptych.router.access") is access_log.access_logger


async def test_times_of_streams_by_route_and_legs_by_worker(make_worker, kit):
    prefill = await make_worker(kit.answers())
    pause = asyncio.Event()

    async def wait(request, seen):
        await pause.wait()

    decode = await make_worker(kit.streams([kit.event(1)], then=wait))
    async with kit.router([prefill], [decode]) as router:
        async with router.post("/v1/chat/completions") as response:
            await response.content.readany()
            pause.set()
            await response.read()
        async with router.post("/generate") as response:
            await response.read()
        decode.script = kit.answers()
        async with router.post("/generate") as response:
            await response.read()
        chat, native = 'route="/v1/chat/completions"', 'route="/generate"'
        expected = {
            f"diptych_router_first_byte_seconds_count{{{native}}}": 2,
            f"diptych_router_time_to_first_token_seconds_count{{{native}}}": 1,  # streams alone
            f"diptych_router_time_to_first_token_seconds_count{{{chat}}}": 1,
            f"diptych_router_request_seconds_count{{{chat}}}": 1,
            f"diptych_router_request_seconds_count{{{native}}}": 2,
            f'diptych_router_worker_requests_total{{role="prefill",worker="{prefill.url}"}}': 3,
            f'diptych_router_worker_requests_total{{role="decode",worker="{decode.url}"}}': 3,
        }
        assert {start: await router.metric(start) for start in expected} == expected
