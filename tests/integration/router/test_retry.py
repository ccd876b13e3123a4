"""What is tried again, where, and with which room."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_refused_request_goes_to_another_pair_with_a_fresh_room(make_worker, kit, side):
    refusing, willing = await make_worker(kit.fails(503, "full")), await make_worker(kit.answers())
    other = await make_worker(kit.hangs)

    async def waits_for_its_refused_partner_then_answers(request, seen):
        return await (kit.hangs if len(other.seen) == 1 else kit.answers())(request, seen)

    other.script = waits_for_its_refused_partner_then_answers
    sides = ([refusing, willing], [other]) if side == "prefill" else ([other], [refusing, willing])
    async with kit.router(*sides) as router:
        async with router.post() as response:
            assert response.status == 200
        retries = 'diptych_router_retries_total{cause="refused",route="/v1/completions"}'
        assert await router.metric(retries) == 1
    assert len(refusing.seen) == len(willing.seen) == 1
    assert other.seen[0].left.is_set()
    assert refusing.seen[0].body["bootstrap_room"] != willing.seen[0].body["bootstrap_room"]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_worker_that_is_gone_is_marked_down_at_once_and_the_request_served_elsewhere(
    make_worker, kit, side
):
    gone, here = await make_worker(kit.answers()), await make_worker(kit.answers())
    other = await make_worker(kit.answers())
    sides = ([gone, here], [other]) if side == "prefill" else ([other], [gone, here])
    # Health is polled rarely: only the failed connection itself can tell.
    async with kit.router(*sides, "--health-interval", "3600") as router:
        await gone.stop()
        for _ in range(4):
            async with router.post() as response:
                assert response.status == 200
        failures = f'diptych_router_leg_failures_total{{kind="connect",role="{side}",worker="{gone.url}"}}'
        assert await router.metric(failures) == 1
        health = f'diptych_router_worker_healthy{{role="{side}",worker="{gone.url}"}}'
        assert await router.metric(health) == 0
    assert len(here.seen) == 4


async def test_a_retry_avoids_the_worker_that_refused(make_worker, kit):
    prefill = await make_worker(kit.answers())
    refusing, willing = await make_worker(kit.fails(503, "full")), await make_worker(kit.answers())
    flags = ("--policy", "random", "--max-retries", "1")
    async with kit.router([prefill], [refusing, willing], *flags) as router:
        for _ in range(20):
            async with router.post() as response:
                assert response.status == 200
    assert len(refusing.seen) >= 1
    assert len(willing.seen) == 20


async def test_retries_end_after_max_retries_and_name_the_leg_and_its_reason(make_worker, kit):
    prefill, decode = await make_worker(kit.fails(503, "pool is full")), await make_worker(kit.hangs)
    async with (
        kit.router([prefill], [decode], "--max-retries", "3") as router,
        router.post() as response,
    ):
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        message = (await response.json())["error"]["message"]
        exhausted = 'diptych_router_retries_exhausted_total{route="/v1/completions"}'
        assert await router.metric(exhausted) == 1
    assert f"prefill worker {prefill.url}" in message
    assert "pool is full" in message
    assert len(prefill.seen) == 4
    assert len({s.body["bootstrap_room"] for s in prefill.seen}) == 4


async def test_max_retries_0_tries_once(make_worker, kit):
    prefill, decode = await make_worker(kit.fails(503, "full")), await make_worker(kit.hangs)
    async with (
        kit.router([prefill], [decode], "--max-retries", "0") as router,
        router.post() as response,
    ):
        assert response.status == 503
    assert len(prefill.seen) == 1


@pytest.mark.parametrize("script", ["breaks", "error 500", "broken stream", "broken after one event"])
async def test_what_may_have_produced_output_is_never_replayed(make_worker, kit, script):
    scripts = {
        "breaks": kit.breaks,
        "error 500": kit.fails(500, "boom"),
        "broken stream": kit.streams([], then=kit.breaks),
        "broken after one event": kit.streams([kit.event(1)], then=kit.breaks),
    }
    prefills = [await make_worker(kit.answers()) for _ in range(2)]
    decodes = [await make_worker(scripts[script]) for _ in range(2)]
    async with kit.router(prefills, decodes) as router:
        async with router.post() as response:
            body = await response.read()
        assert b'"error"' in body
        await router.wait_idle()
    assert sum(len(d.seen) for d in decodes) == 1
    assert sum(len(p.seen) for p in prefills) == 1


async def test_no_healthy_worker_is_a_503_that_says_which_and_why(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    decode.health_status = 503
    async with (
        kit.router([prefill], [decode], ready=False) as router,
        router.post() as response,
    ):
        assert response.status == 503
        message = (await response.json())["error"]["message"]
        assert "no healthy decode worker" in message
        assert decode.url in message
