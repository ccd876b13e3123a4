"""Everything but the generating routes: health, proxied routes, fan-out, metrics, keys, request ids."""

from __future__ import annotations

import asyncio

import pytest


async def pair(make_worker, kit):
    return await make_worker(kit.answers()), await make_worker(kit.answers())


async def wait_for_health(router, kit, status):
    async with asyncio.timeout(kit.PATIENCE):
        while True:
            async with router.get("/health") as response:
                if response.status == status:
                    return await response.text()
            await asyncio.sleep(0.01)


async def test_health_follows_the_workers(make_worker, kit):
    prefill, decode = await pair(make_worker, kit)
    async with kit.router([prefill], [decode]) as router:
        await wait_for_health(router, kit, 200)
        prefill.health_status = 500
        assert prefill.url in await wait_for_health(router, kit, 503)
        prefill.health_status = 200
        await wait_for_health(router, kit, 200)
        await decode.stop()
        assert decode.url in await wait_for_health(router, kit, 503)
        await decode.start()
        await wait_for_health(router, kit, 200)


async def test_an_unhealthy_worker_gets_no_requests_until_it_is_back(make_worker, kit):
    prefill = await make_worker(kit.answers())
    sick, well = await pair(make_worker, kit)
    async with kit.router([prefill], [sick, well]) as router:
        worker = next(w for w in router.server.registry.workers if w.url == sick.url)

        sick.health_status = 503
        await kit.eventually(lambda: not worker.healthy)
        for _ in range(4):
            async with router.post() as response:
                assert response.status == 200
        assert (len(sick.seen), len(well.seen)) == (0, 4)
        sick.health_status = 200
        await kit.eventually(lambda: worker.healthy)
        for _ in range(4):
            async with router.post() as response:
                assert response.status == 200
        assert (len(sick.seen), len(well.seen)) == (2, 6)


async def test_round_robin_takes_each_side_in_turn(make_worker, kit):
    prefills = [await make_worker(kit.answers()) for _ in range(2)]
    decodes = [await make_worker(kit.answers()) for _ in range(3)]
    async with kit.router(prefills, decodes, "--policy", "round_robin") as router:
        for _ in range(6):
            async with router.post() as response:
                assert response.status == 200
    assert [len(w.seen) for w in prefills] == [3, 3]
    assert [len(w.seen) for w in decodes] == [2, 2, 2]
    ports = {s.body["bootstrap_port"] for s in prefills[0].seen}
    assert len(ports) == 1  # a prefill's own port goes with its requests
    assert ports.isdisjoint({s.body["bootstrap_port"] for s in prefills[1].seen})


async def test_random_uses_every_worker(make_worker, kit):
    prefill = await make_worker(kit.answers())
    decodes = [await make_worker(kit.answers()) for _ in range(2)]
    async with kit.router([prefill], decodes, "--policy", "random") as router:
        for _ in range(40):
            async with router.post() as response:
                assert response.status == 200
    counts = [len(w.seen) for w in decodes]
    assert sum(counts) == 40
    assert min(counts) >= 4  # 2e-6 of all runs fail this


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_comes_from_a_decode_worker(make_worker, kit, path):
    prefill, decode = await pair(make_worker, kit)
    async with kit.router([prefill], [decode]) as router, router.get(path) as response:
        assert await response.json() == {"worker": decode.port, "path": path, "echo": ""}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_tokenizer_routes_pass_their_body_on(make_worker, kit, path):
    prefill, decode = await pair(make_worker, kit)
    async with kit.router([prefill], [decode]) as router, router.post(path, {"prompt": "x"}) as response:
        assert (await response.json())["echo"] == '{"prompt": "x"}'


async def test_a_proxied_call_moves_on_from_a_dead_worker(make_worker, kit):
    prefill = await make_worker(kit.answers())
    gone, here = await pair(make_worker, kit)
    async with kit.router([prefill], [gone, here], "--health-interval", "3600") as router:
        await gone.stop()
        async with router.get("/model_info") as response:
            assert (await response.json())["worker"] == here.port


async def test_health_generate_asks_a_pair_for_one_token(make_worker, kit):
    prefill, decode = await pair(make_worker, kit)
    async with kit.router([prefill], [decode]) as router:
        async with router.get("/health_generate") as response:
            assert response.status == 200
        assert prefill.seen[0].body == decode.seen[0].body
        assert decode.seen[0].body["sampling_params"]["max_new_tokens"] == 1
        assert "bootstrap_room" in decode.seen[0].body
        decode.script = kit.fails(500, "no")
        async with router.get("/health_generate") as response:
            assert response.status == 502


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/generate", 405), ("POST", "/faults", 404)],
)
async def test_what_is_not_served_says_so_in_openai_shape(make_worker, kit, method, path, status):
    prefill, decode = await pair(make_worker, kit)
    async with kit.router([prefill], [decode]) as router:
        async with router.client.request(method, router.url + path) as response:
            assert response.status == status
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        assert await router.metric('diptych_router_requests_total{route="/nope"') == 0


async def test_a_body_over_the_limit_is_a_413(make_worker, kit):
    prefill, decode = await pair(make_worker, kit)
    async with (
        kit.router([prefill], [decode], "--max-request-bytes", "2048") as router,
        router.post(data={"prompt": "x" * 4096}) as response,
    ):
        assert response.status == 413
        assert "2048" in (await response.json())["error"]["message"]
    assert decode.seen == []


async def test_a_huge_body_gets_its_413_and_not_a_reset(make_worker, kit):
    prefill, decode = await pair(make_worker, kit)
    async with kit.router([prefill], [decode]) as router:
        url = router.url + "/v1/completions"
        async with router.client.post(url, data=b"x" * (50 << 20)) as response:
            assert response.status == 413
    assert decode.seen == []


async def test_a_body_announced_as_too_large_is_not_waited_for(make_worker, kit):
    prefill, decode = await pair(make_worker, kit)
    async with kit.router([prefill], [decode]) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":", 1)[1]))
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 1)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_body_that_can_not_be_unpacked_is_a_400(make_worker, kit):
    prefill, decode = await pair(make_worker, kit)
    async with kit.router([prefill], [decode]) as router:
        # By hand: a client library may notice that the connection closes before it reads the answer.
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":", 1)[1]))
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 8\r\n\r\n"
        writer.write(head + b"not gzip")
        answer = await asyncio.wait_for(reader.read(), kit.PATIENCE)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"invalid_request_error"' in answer
        async with router.post() as response:
            assert response.status == 200


async def test_the_api_key_is_enforced_and_passed_on(make_worker, kit):
    prefill, decode = await pair(make_worker, kit)
    async with kit.router([prefill], [decode], "--api-key", "s3cret") as router:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            async with router.post(headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        good = {"Authorization": "Bearer s3cret"}
        async with router.post(headers=good) as response:
            assert response.status == 200
        for path, status in (("/health", 200), ("/metrics", 200), ("/engine_metrics", 401)):
            async with router.get(path) as response:
                assert response.status == status
        async with router.get("/server_info", headers=good) as response:
            assert "s3cret" not in await response.text()
    assert (
        decode.seen[0].headers["Authorization"] == prefill.seen[0].headers["Authorization"] == "Bearer s3cret"
    )
    assert len(decode.seen) == 1


async def test_request_ids_go_end_to_end(make_worker, kit):
    prefill, decode = await pair(make_worker, kit)
    async with kit.router([prefill], [decode]) as router:
        async with router.post(headers={"X-Request-Id": "mine-1"}) as response:
            assert response.headers["X-Request-Id"] == "mine-1"
        async with router.post() as response:
            made = response.headers["X-Request-Id"]
        async with router.get("/nope", headers={"X-Request-Id": "mine-2"}) as response:
            assert response.headers["X-Request-Id"] == "mine-2"
    for worker in (prefill, decode):
        assert [s.headers["X-Request-Id"] for s in worker.seen] == ["mine-1", made]
    assert len(made) == 32


async def test_metrics_count_requests_and_first_bytes(make_worker, kit):
    prefill, decode = await pair(make_worker, kit)
    async with kit.router([prefill], [decode]) as router:
        for _ in range(3):
            async with router.post("/v1/chat/completions") as response:
                assert response.status == 200
        route = 'route="/v1/chat/completions"'
        assert await router.metric(f'diptych_router_requests_total{{{route},status="200"}}') == 3
        assert await router.metric(f"diptych_router_first_byte_seconds_count{{{route}}}") == 3
        assert (
            await router.metric(f'diptych_router_worker_healthy{{role="decode",worker="{decode.url}"}}') == 1
        )
        in_flight = f'diptych_router_worker_in_flight{{role="decode",worker="{decode.url}"}}'
        assert await router.metric(in_flight) == 0
