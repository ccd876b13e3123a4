"""Workers that fail again and again, more requests than turns, and answers that don't come."""

from __future__ import annotations

import asyncio
import json

import pytest


def breakers(router):
    return [str(w.breaker.state) for w in router.server.registry.workers]


async def test_a_worker_that_fails_every_request_gets_none_until_one_that_tries_succeeds(make_worker, kit):
    prefill = await make_worker(kit.answers())
    failing, working = await make_worker(kit.fails(500, "boom")), await make_worker(kit.answers())
    flags = ("--breaker-failures", "2", "--breaker-cooldown", "0.3")
    async with kit.router([prefill], [failing, working], *flags) as router:

        async def statuses(count):
            found = []
            for _ in range(count):
                async with router.post() as response:
                    found.append(response.status)
            return found

        assert sorted(await statuses(4)) == [200, 200, 502, 502]
        assert breakers(router) == ["closed", "open", "closed"]
        gauge = f'diptych_router_worker_breaker{{role="decode",worker="{failing.url}"}}'
        assert await router.metric(gauge) == 2
        async with router.get("/server_info") as response:
            shown = {w["url"]: w["breaker"] for w in (await response.json())["workers"]}
        assert (shown[failing.url], shown[working.url]) == ("open", "closed")
        assert await statuses(6) == [200] * 6
        assert len(failing.seen) == 2

        failing.script = kit.answers()
        await kit.eventually(lambda: router.server.registry.workers[1].breaker.passes)
        assert await statuses(2) == [200, 200]
        assert breakers(router) == ["closed"] * 3
        assert len(failing.seen) == 3


@pytest.mark.parametrize("ending", ["breaks", "hangs"])
async def test_a_worker_that_begins_every_answer_and_finishes_none_gets_no_more(make_worker, kit, ending):
    prefill = await make_worker(kit.answers())
    failing = await make_worker(kit.streams([kit.event(1)], then=getattr(kit, ending)))
    working = await make_worker(kit.streams([kit.event(2)]))
    flags = ("--breaker-failures", "2", "--breaker-cooldown", "0.3", "--stream-idle-timeout", "0.1")
    async with kit.router([prefill], [failing, working], *flags) as router:

        async def ask(count):
            for _ in range(count):
                async with router.post() as response:
                    await response.read()

        breaker = router.server.registry.workers[1].breaker
        await ask(8)
        assert breakers(router) == ["closed", "open", "closed"]
        assert len(failing.seen) == 2
        # The one that tries begins well too, and ends as badly.
        await kit.eventually(lambda: breaker.passes)
        await ask(3)
        assert str(breaker.state) == "open"
        assert len(failing.seen) == 3


async def test_decodes_report_of_a_transfer_that_failed_is_charged_to_the_prefill_that_died(make_worker, kit):
    reported = asyncio.Event()

    async def reports(request, seen):
        reported.set()
        return await kit.fails(502, "the prefill worker is gone")(request, seen)

    async def dies(request, seen):
        await reported.wait()
        return await kit.breaks(request, seen)

    prefill, decode = await make_worker(dies), await make_worker(reports)
    async with kit.router([prefill], [decode], "--breaker-failures", "1") as router:
        async with router.post() as response:
            assert response.status == 502
        assert breakers(router) == ["open", "closed"]


async def test_a_report_of_a_failed_transfer_is_no_reason_not_to_try_again_when_prefill_refused(
    make_worker, kit
):
    """Decode's word that prefill gave the room up may be here before prefill's own."""
    reported = asyncio.Event()

    async def reports_then_answers(request, seen):
        first = not reported.is_set()
        reported.set()
        return await (kit.fails(502, "gave up") if first else kit.answers())(request, seen)

    async def refuses(request, seen):
        await reported.wait()
        return await kit.fails(503, "full")(request, seen)

    refusing, willing = await make_worker(refuses), await make_worker(kit.answers())
    decode = await make_worker(reports_then_answers)
    async with kit.router([refusing, willing], [decode], "--breaker-failures", "1") as router:
        async with router.post() as response:
            assert response.status == 200
        assert len(decode.seen) == 2
        assert breakers(router) == ["closed"] * 3


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_what_a_client_or_a_full_worker_causes_opens_no_breaker(make_worker, kit, status):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.fails(status, "no"))
    flags = ("--breaker-failures", "1", "--max-retries", "0")
    async with kit.router([prefill], [decode], *flags) as router:
        async with router.post() as response:
            assert response.status == status
        assert breakers(router) == ["closed", "closed"]


async def test_the_only_worker_of_a_side_is_tried_whatever_its_breaker_says(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.fails(500, "boom"))
    async with kit.router([prefill], [decode], "--breaker-failures", "1") as router:
        for _ in range(2):
            async with router.post() as response:
                assert response.status == 502
        decode.script = kit.answers()
        async with router.post() as response:
            assert response.status == 200
        assert breakers(router) == ["closed", "closed"]


async def test_requests_beyond_the_limit_wait_and_beyond_the_queue_are_refused(make_worker, kit):
    go_on = asyncio.Event()

    async def waits(request, seen):
        await go_on.wait()
        return await kit.answers()(request, seen)

    prefill, decode = await make_worker(kit.answers()), await make_worker(waits)
    flags = ("--max-concurrent-requests", "1", "--queue-size", "1")
    async with kit.router([prefill], [decode], *flags) as router:

        async def post():
            async with router.post() as response:
                return response.status

        running = asyncio.create_task(post())
        await decode.wait_for_requests(1)
        waiting = asyncio.create_task(post())
        await kit.eventually(lambda: router.server.admission.queued == 1)
        assert await router.metric("diptych_router_queued ") == 1
        async with router.post() as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            error = (await response.json())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert await router.metric('diptych_router_turned_away_total{cause="full"}') == 1

        # A client that leaves makes room for another.
        waiting.cancel()
        await kit.eventually(lambda: router.server.admission.queued == 0)
        other = asyncio.create_task(post())
        await kit.eventually(lambda: router.server.admission.queued == 1)
        assert len(decode.seen) == 1
        go_on.set()
        assert [await running, await other] == [200, 200]
        assert len(decode.seen) == 2
        # It still answers while full, and is well.
        async with router.get("/health") as response:
            assert response.status == 200


async def test_draining_turns_away_who_waits_and_finishes_what_runs(make_worker, kit):
    go_on = asyncio.Event()

    async def waits(request, seen):
        await go_on.wait()
        return await kit.answers()(request, seen)

    prefill, decode = await make_worker(kit.answers()), await make_worker(waits)
    async with kit.router([prefill], [decode], "--max-concurrent-requests", "1") as router:
        running = asyncio.create_task(router.post().__aenter__())
        await decode.wait_for_requests(1)
        waiting = asyncio.create_task(router.post().__aenter__())
        await kit.eventually(lambda: router.server.admission.queued == 1)
        draining = asyncio.create_task(router.server.relay.drain(kit.PATIENCE))
        assert (await waiting).status == 503
        go_on.set()
        assert (await running).status == 200
        await draining


async def test_an_answer_that_does_not_begin_is_a_504_that_charges_who_may_be_at_fault(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.hangs)
    flags = ("--first-byte-timeout", "0.2", "--breaker-failures", "1")
    async with kit.router([prefill], [decode], *flags) as router:
        async with router.post() as response:
            assert response.status == 504
            message = (await response.json())["error"]["message"]
        assert f"decode worker {decode.url}" in message
        assert "--first-byte-timeout" in message
        await asyncio.wait_for(decode.seen[0].left.wait(), 1)
        assert breakers(router) == ["closed", "open"]
        prefill.script = kit.hangs
        async with router.post() as response:
            assert response.status == 504
        assert breakers(router) == ["open", "open"]


async def test_a_stream_that_falls_silent_ends_in_an_error_event(make_worker, kit):
    prefill = await make_worker(kit.answers())
    decode = await make_worker(kit.streams([kit.event(1)], then=kit.hangs))
    async with kit.router([prefill], [decode], "--stream-idle-timeout", "0.2") as router:
        async with router.post() as response:
            body = await response.read()
        await asyncio.wait_for(decode.seen[0].left.wait(), 1)
    first, error, done, _ = body.split(b"\n\n")
    assert (first, done) == (b"data: 1", b"data: [DONE]")
    assert b"--stream-idle-timeout" in error


async def test_a_stream_of_responses_fails_by_an_event_of_that_route(make_worker, kit):
    prefill = await make_worker(kit.answers())
    begun = b'event: x\ndata: {"sequence_number":4}\n\nevent: y\ndata: {"sequence_number":5}\n\n'
    decode = await make_worker(kit.streams([begun], then=kit.breaks))
    async with kit.router([prefill], [decode]) as router, router.post("/v1/responses") as response:
        body = await response.read()
    start, _, data = body.partition(b"event: error\ndata: ")
    assert start == begun
    error = json.loads(data)
    assert (error.pop("type"), error.pop("sequence_number"), error.pop("param")) == ("error", 6, None)
    assert error.pop("code") == "worker_failed"
    assert decode.url in error.pop("message")
    assert error == {}


async def test_a_pause_of_the_client_is_no_silence_of_the_worker(make_worker, kit):
    """Only time in which the router waits for the worker counts."""
    stop = asyncio.Event()
    big = kit.event("x" * (1 << 20))

    async def floods(request, seen):
        response = await kit.open_stream(request)
        for _ in range(48):  # more than fits in the buffers of all sockets
            await response.write(big)
        stop.set()
        return response

    prefill, decode = await make_worker(kit.answers()), await make_worker(floods)
    async with (
        kit.router([prefill], [decode], "--stream-idle-timeout", "0.2") as router,
        router.post() as response,
    ):
        await asyncio.sleep(0.5)
        assert not stop.is_set()
        assert len(await response.read()) == 48 * len(big)


async def test_connections_to_workers_notice_a_dead_network(make_worker, kit):
    import socket

    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.hangs)
    async with kit.router([prefill], [decode], "--dead-peer-timeout", "9") as router:
        request = asyncio.create_task(router.post().__aenter__())
        await decode.wait_for_requests(1)
        connections = [
            protocol.transport.get_extra_info("socket")
            for protocol in router.server.session.connector._acquired
        ]
        assert connections
        for connection in connections:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            wanted = {"KEEPIDLE": 3, "KEEPINTVL": 3, "KEEPCNT": 2, "USER_TIMEOUT": 9000}
            for name, value in wanted.items():
                option = getattr(socket, f"TCP_{name}")
                assert connection.getsockopt(socket.IPPROTO_TCP, option) == value
        request.cancel()
