"""The two legs of a request: what is relayed, when, and what ends with what."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest


async def test_both_legs_get_the_same_body_with_the_bootstrap_fields(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers(data={"text": "x"}))
    async with kit.router([prefill], [decode]) as router:
        sent = {"model": "m", "prompt": [1, 2], "n": 2, "someone_elses_field": {"a": [1.5, None]}}
        async with router.post(data=sent) as response:
            assert (response.status, await response.json()) == (200, {"text": "x"})
    (left,), (right,) = prefill.seen, decode.seen
    assert left.body == right.body
    room = left.body["bootstrap_room"]
    assert 0 <= room < 2**63
    expected = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9000, "bootstrap_room": room}
    assert left.body == {**sent, **expected}


async def test_each_request_has_a_room_of_its_own(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with kit.router([prefill], [decode]) as router:
        for _ in range(20):
            async with router.post() as response:
                assert response.status == 200
    assert len({s.body["bootstrap_room"] for s in decode.seen}) == 20


async def test_bootstrap_fields_and_number_digits_of_the_client_are_handled(make_worker, kit):
    """A client can't choose the room, and a big number isn't rounded on the way."""
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with kit.router([prefill], [decode]) as router:
        raw = '{"prompt":"é","bootstrap_room":7,"seed":123456789012345678901234567890}'
        url = router.url + "/v1/completions"
        async with router.client.post(url, data=raw.encode()) as response:
            assert response.status == 200
    body = decode.seen[0].body
    assert body["seed"] == 123456789012345678901234567890
    assert body["bootstrap_room"] != 7
    assert body["prompt"] == "é"


async def test_first_byte_is_relayed_before_a_slow_prefill_body_ends(make_worker, kit):
    release = asyncio.Event()

    async def slow_body(request, _):
        response = await kit.open_stream(request)
        await response.write(b"data: prefill\n\n")
        await release.wait()
        await response.write_eof()
        return response

    prefill = await make_worker(slow_body)
    decode = await make_worker(kit.streams([kit.event({"token": 1}), kit.event(b"[DONE]")]))
    async with kit.router([prefill], [decode]) as router:
        async with router.post() as response:
            body = await asyncio.wait_for(response.read(), kit.PATIENCE)
        assert body == kit.event({"token": 1}) + kit.event(b"[DONE]")
        assert not prefill.seen[0].left.is_set()
        assert router.server.registry.workers[0].in_flight == 1  # its body is still being read
        release.set()
        await router.wait_idle()
    assert not prefill.seen[0].left.is_set()  # read to its end, not dropped


async def test_chunks_are_relayed_one_by_one(make_worker, kit):
    gates = [asyncio.Event() for _ in range(3)]

    async def gated(request, _):
        response = await kit.open_stream(request)
        for number, gate in enumerate(gates):
            await gate.wait()
            await response.write(kit.event(number))
        await response.write_eof()
        return response

    prefill, decode = await make_worker(kit.answers()), await make_worker(gated)
    async with kit.router([prefill], [decode]) as router:
        gates[0].set()
        async with router.post() as response:
            assert response.content_type == "text/event-stream"
            for number in range(3):
                chunk = await asyncio.wait_for(response.content.readany(), kit.PATIENCE)
                assert chunk == kit.event(number)
                if number < 2:
                    gates[number + 1].set()


@pytest.mark.parametrize("failing", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["answer", "connection"])
async def test_a_failing_leg_cancels_the_other(make_worker, kit, failing, how):
    failure = kit.fails(500, "out of luck") if how == "answer" else kit.breaks
    broken, waiting = await make_worker(failure), await make_worker(kit.hangs)
    sides = ([broken], [waiting]) if failing == "prefill" else ([waiting], [broken])
    async with kit.router(*sides) as router:
        started = time.monotonic()
        async with router.post() as response:
            answer = await response.json()
        assert time.monotonic() - started < 1
        assert response.status == 502
        assert f"{failing} worker {broken.url}" in answer["error"]["message"]
        if how == "answer":
            assert "out of luck" in answer["error"]["message"]
        await asyncio.wait_for(waiting.seen[0].left.wait(), 1)
        assert len(waiting.seen) == len(broken.seen) == 1  # may have produced output: not replayed
        await router.wait_idle()


async def test_prefill_failing_after_decodes_head_but_before_its_first_byte_is_an_error(make_worker, kit):
    decode = await make_worker(kit.streams([], then=kit.hangs))

    async def fails_once_decode_has_answered(request, seen):
        await decode.wait_for_requests(1)
        await asyncio.sleep(0.05)  # decode's head reaches the router; not needed for the test to pass
        return await kit.fails(500, "transfer failed")(request, seen)

    prefill = await make_worker(fails_once_decode_has_answered)
    async with kit.router([prefill], [decode]) as router:
        async with router.post() as response:
            assert response.status == 502
            assert "transfer failed" in (await response.json())["error"]["message"]
        await asyncio.wait_for(decode.seen[0].left.wait(), 1)


async def test_decode_may_answer_although_prefill_reports_a_failed_transfer(make_worker, kit):
    prefill = await make_worker(kit.fails(502, "the decode worker is gone"))

    async def answers_a_moment_later(request, seen):
        await prefill.wait_for_requests(1)
        await asyncio.sleep(0.02)
        return await kit.answers()(request, seen)

    decode = await make_worker(answers_a_moment_later)
    async with kit.router([prefill], [decode]) as router:
        async with router.post() as response:
            assert response.status == 200
        decode.script = kit.hangs
        started = time.monotonic()
        async with router.post() as response:
            assert response.status == 502
            assert "the decode worker is gone" in (await response.json())["error"]["message"]
        assert time.monotonic() - started < 1
        await asyncio.wait_for(decode.seen[1].left.wait(), 1)


async def test_prefill_failing_after_decodes_first_byte_is_not_an_error(make_worker, kit):
    first_byte_seen, prefill_failed = asyncio.Event(), asyncio.Event()

    async def fails_late(request, seen):
        response = await kit.open_stream(request)
        await first_byte_seen.wait()
        prefill_failed.set()
        request.transport.abort()
        return response

    async def wait(_, __):
        await prefill_failed.wait()
        await asyncio.sleep(0.05)  # the broken connection reaches the router

    prefill = await make_worker(fails_late)
    decode = await make_worker(kit.streams([kit.event(1)], then=wait))
    async with kit.router([prefill], [decode]) as router:
        async with router.post() as response:
            assert await response.content.readany() == kit.event(1)
            first_byte_seen.set()
            assert await response.content.read() == b""
        await router.wait_idle()


@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_a_4xx_is_relayed_as_it_is_without_waiting_for_the_other_leg(make_worker, kit, failing):
    error = {"error": {"message": "too long", "type": "t", "param": "prompt", "code": 42}}
    refusing = await make_worker(kit.answers(429, error, **{"Retry-After": "7"}))
    waiting = await make_worker(kit.hangs)
    sides = ([refusing], [waiting]) if failing == "prefill" else ([waiting], [refusing])
    async with kit.router(*sides) as router:
        async with router.post() as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "7"
            assert response.content_type == "application/json"
            assert await response.json() == error
        await asyncio.wait_for(waiting.seen[0].left.wait(), 1)
    assert len(refusing.seen) == 1


async def test_decode_breaking_in_mid_stream_ends_in_an_error_event(make_worker, kit):
    prefill = await make_worker(kit.answers())
    decode = await make_worker(kit.streams([kit.event({"t": 1})], then=kit.breaks))
    async with kit.router([prefill], [decode]) as router, router.post() as response:
        body = await response.read()
    first, last, done, rest = body.split(b"\n\n")
    assert first + b"\n\n" == kit.event({"t": 1})
    assert last.startswith(b'data: {"error":')
    assert decode.url.encode() in last
    assert (done, rest) == (b"data: [DONE]", b"")  # as a worker ends a stream that failed
    assert len(decode.seen) == 1


async def test_the_connection_of_a_failed_stream_serves_the_next_request(make_worker, kit):
    prefill = await make_worker(kit.answers())
    decode = await make_worker(kit.streams([kit.event(1)], then=kit.breaks))
    async with (
        kit.router([prefill], [decode]) as router,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as client,
    ):
        ports = set()
        for _ in range(3):
            async with client.post(router.url + "/v1/completions", json={"prompt": "x"}) as response:
                ports.add(response.connection.transport.get_extra_info("sockname")[1])
                assert b'"error"' in await response.read()
        assert len(ports) == 1


async def test_an_error_event_never_joins_a_torn_event(make_worker, kit):
    prefill = await make_worker(kit.answers())
    decode = await make_worker(kit.streams([b'data: {"to'], then=kit.breaks))
    async with kit.router([prefill], [decode]) as router, router.post() as response:
        body = await response.read()
    assert body.startswith(b'data: {"to\n\ndata: {"error":')


@pytest.mark.parametrize("announced", [True, False])
async def test_a_broken_body_that_is_not_an_event_stream_looks_broken(make_worker, kit, announced):
    async def half(request, seen):
        response = web_response(announced)
        await response.prepare(request)
        await response.write(b'{"choices": [')
        return await kit.breaks(request, seen)

    from aiohttp import web

    def web_response(announced):
        headers = {"Content-Type": "application/json"}
        if announced:
            headers["Content-Length"] = "1000"
        return web.StreamResponse(headers=headers)

    prefill, decode = await make_worker(kit.answers()), await make_worker(half)
    async with kit.router([prefill], [decode]) as router, router.post() as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


@pytest.mark.parametrize("when", ["waiting", "streaming"])
async def test_client_disconnect_reaches_both_workers_within_a_second(make_worker, kit, when):
    prefill = await make_worker(kit.hangs)
    decode = await make_worker(kit.streams([kit.event(1)] if when == "streaming" else [], then=kit.hangs))
    async with kit.router([prefill], [decode]) as router:
        request = asyncio.create_task(router.post().__aenter__())
        await prefill.wait_for_requests(1)
        await decode.wait_for_requests(1)
        if when == "streaming":
            response = await request
            assert await response.content.readany() == kit.event(1)
            response.close()
        else:
            request.cancel()
        async with asyncio.timeout(1):
            await prefill.seen[0].left.wait()
            await decode.seen[0].left.wait()
        await router.wait_idle()
        assert await router.metric('diptych_router_requests_total{route="/v1/completions",status="499"}') == 1


@pytest.mark.parametrize("when", ["waiting", "streaming"])
async def test_the_request_timeout_ends_both_legs(make_worker, kit, when):
    prefill = await make_worker(kit.hangs)
    decode = await make_worker(kit.streams([kit.event(1)] if when == "streaming" else [], then=kit.hangs))
    async with kit.router(
        [prefill], [decode], "--request-timeout", "0.3", "--connect-timeout", "0.2"
    ) as router:
        async with router.post() as response:
            body = await response.read()
        if when == "waiting":
            assert response.status == 504
        else:
            assert body.startswith(kit.event(1) + b'data: {"error":')
        assert b"request-timeout" in body
        async with asyncio.timeout(1):
            await prefill.seen[0].left.wait()
            await decode.seen[0].left.wait()


async def test_64_concurrent_streams_arrive_whole_and_unmixed(make_worker, kit):
    arrived = asyncio.Event()

    async def many(request, seen):
        response = await kit.open_stream(request)
        if len(decode.seen) == 64:
            arrived.set()
        await arrived.wait()  # all 64 are open at once
        for number in range(50):
            await response.write(kit.event([seen.body["prompt"], number]))
        await response.write_eof()
        return response

    prefill, decode = await make_worker(kit.answers()), await make_worker(many)
    async with kit.router([prefill], [decode]) as router:

        async def one(name):
            async with router.post(data={"prompt": name}) as response:
                return await response.read()

        bodies = await asyncio.gather(*(one(f"p{i}") for i in range(64)))
        for i, body in enumerate(bodies):
            assert body == b"".join(kit.event([f"p{i}", number]) for number in range(50))
        await router.wait_idle()


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b'"x"', b'{"prompt": "\xff"}', b"null", b"[" * 100_000, b'{"a":' * 100_000]
)
async def test_a_body_that_is_no_json_object_gets_a_400_from_the_router(make_worker, kit, raw):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with kit.router([prefill], [decode]) as router:
        async with router.client.post(router.url + "/generate", data=raw) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        async with router.post() as response:
            assert response.status == 200
    assert len(decode.seen) == 1
