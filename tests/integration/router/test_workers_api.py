"""`/workers`: workers that come, renew, change and leave while the router runs."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from urllib.parse import quote

import pytest
from aiohttp import web
from support.certificates import make_certificate


def told(worker, role, **more):
    return {"url": worker.url, "role": role} | more


async def post(router, body, status):
    async with router.post("/workers", body) as response:
        answer = await response.json()
        assert response.status == status, answer
        return answer


async def listed(router):
    async with router.get("/workers") as response:
        assert response.status == 200
        return {w["url"]: w for w in (await response.json())["workers"]}


async def served_by(router, status=200):
    async with router.post() as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_a_router_without_workers_waits_for_them(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with kit.router([], []) as router:
        async with router.get("/health") as response:
            assert response.status == 503
            assert "no healthy prefill worker" in await response.text()
        answer = await post(router, told(prefill, "prefill", bootstrap_port=9123), 202)
        assert answer["worker"]["bootstrap_port"] == 9123
        # The names that tools for existing PD routers use.
        answer = await post(
            router, {"url": decode.url, "worker_type": "decode", "labels": {"rack": "7"}}, 202
        )
        await kit.eventually(lambda: router.server.registry.has_pair)
        await served_by(router)
        assert decode.seen[0].body["bootstrap_port"] == 9123
        async with router.get(answer["location"]) as response:
            shown = await response.json()
    assert shown == shown | {"state": "up", "origin": "api", "labels": {"rack": "7"}, "worker_type": "decode"}


async def test_ids_are_the_same_in_every_router_and_fit_a_path(make_worker, kit):
    decode = await make_worker(kit.answers())
    ids = set()
    for _ in range(2):
        async with kit.router([], [decode]) as router:
            ids.add((await listed(router))[decode.url]["id"])
    (name,) = ids
    assert quote(name, safe="") == name


async def test_a_removed_worker_gets_nothing_new_and_finishes_what_runs(make_worker, kit):
    go_on = asyncio.Event()

    async def wait(_, __):
        await go_on.wait()

    prefill = await make_worker(kit.answers())
    old = await make_worker(kit.streams([kit.event(1)], then=wait))
    new = await make_worker(kit.answers())
    async with kit.router([prefill], [old]) as router:
        async with router.post() as stream:
            assert await stream.content.readany() == kit.event(1)
            await post(router, told(new, "decode"), 202)
            await kit.eventually(lambda: all(w.healthy for w in router.server.registry.workers))
            name = (await listed(router))[old.url]["id"]
            async with router.client.delete(f"{router.url}/workers/{name}") as response:
                assert response.status == 202
                assert (await response.json())["status"] == "draining"
            for _ in range(3):
                await served_by(router)
            assert (len(old.seen), len(new.seen)) == (1, 3)
            assert (await listed(router))[old.url]["state"] == "draining"
            go_on.set()
            assert await stream.content.read() == b""
        await kit.eventually(lambda: not router.server.registry.leaving)
        async with router.get(f"/workers/{name}") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "not_found"
        assert await router.metric(f'diptych_router_worker_healthy{{role="decode",worker="{old.url}"}}') == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"role": "decode"}, "url"),
        ({"url": "ftp://a", "role": "decode"}, "url"),
        ({"url": "http://a:1/path", "role": "decode"}, "url"),
        ({"url": 3, "role": "decode"}, "url"),
        ({"url": "http://..a:1", "role": "decode"}, "url"),
        ({"url": "http://a\\b:1", "role": "decode"}, "url"),
        ({"url": "http://xn--a:1", "role": "decode"}, "url"),
        ({"url": f"http://{'a' * 300}:1", "role": "decode"}, "url"),
        ({"url": f"http://{'a.' * 300}a:1", "role": "decode"}, "url"),
        ({"url": "http://a:1", "role": "regular"}, "role"),
        ({"url": "http://a:1", "role": "decode", "worker_type": "prefill"}, "role"),
        ({"url": "http://127.0.0.1:1"}, "role"),
        ({"url": "http://a:1", "role": "prefill", "bootstrap_port": 0}, "bootstrap_port"),
        ({"url": "http://a:1", "role": "decode", "lease": 0.1}, "lease"),
        ({"url": "http://a:1", "role": "decode", "labels": {"a": 1}}, "labels"),
        ({"url": "http://a:1", "role": "decode", "labels": {"a": "x" * 300}}, "labels"),
        ({"url": "http://a:1", "role": "decode", "priority": 3}, "priority"),
        ([], None),
    ],
)
async def test_what_can_not_be_is_a_400_that_names_the_field(kit, body, param):
    async with kit.router([], []) as router:
        error = (await post(router, body, 400))["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert await listed(router) == {}


async def test_a_worker_is_known_once(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with kit.router([prefill], [decode]) as router:
        for role in ("decode", "prefill"):
            error = (await post(router, told(decode, role), 409))["error"]
            assert error["code"] == "worker_exists"
        error = (await post(router, told(decode, "prefill", instance_id="x"), 409))["error"]
        assert "--decode" in error["message"]
        other_spelling = decode.url.replace("http", "HTTP") + "/"
        assert (await post(router, {"url": other_spelling, "role": "decode"}, 409))["error"]["param"] == "url"
        assert len(await listed(router)) == 2
        async with router.get(f"/workers/{quote(other_spelling, safe='')}") as response:
            assert (await response.json())["url"] == decode.url


@pytest.mark.parametrize(
    "url", ["http://u:hunter2@a:1", "http://u:hunter2/x@a:1", "http://u:hunter2@a:x", "u:hunter2@a"]
)
async def test_a_password_in_a_url_is_not_repeated(kit, url):
    async with kit.router([], []) as router:
        error = (await post(router, {"url": url, "role": "decode"}, 400))["error"]
        assert "hunter2" not in error["message"]


async def test_a_worker_with_another_key_is_shown_and_logged_once(make_worker, kit, caplog):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())

    async def refuses(_):
        return web.json_response({"error": {"message": "wrong key"}}, status=401)

    decode.pages["/v1/models"] = refuses
    async with kit.router([prefill], [decode], "--health-interval", "0.01") as router:
        watched = router.server.registry.by_url(decode.url)
        await kit.eventually(lambda: len([path for _, path, _ in decode.other if path == "/v1/models"]) > 2)
        shown = await listed(router)
        assert shown[decode.url]["state"] == "up"
        assert "doesn't take this router's API key" in shown[decode.url]["warning"]
        assert shown[prefill.url]["warning"] is None
        del decode.pages["/v1/models"]
        await kit.eventually(lambda: not watched.warning)
    assert len([r for r in caplog.records if "this router's API key" in r.getMessage()]) == 1


async def test_a_certificate_that_is_not_trusted_is_named_as_the_reason(kit, tmp_path, caplog):
    files = make_certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files["cert"], files["key"])
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=tls)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    flags = ("--prefill", url, "9000", "--health-interval", "0.01")
    async with server, kit.router([], [], *flags, ready=False) as router:
        (worker,) = router.server.registry.workers
        await kit.eventually(lambda: "certificate" in worker.reason)
        await worker.poll(router.server.session)
        async with router.get("/health") as response:
            said = (await response.json())["error"]["message"]
    assert "its certificate is not trusted: self-signed certificate" in said
    assert "--worker-ca-file" in said
    assert len([r for r in caplog.records if "--worker-ca-file" in r.getMessage()]) == 1


async def test_a_worker_of_the_other_role_is_refused_and_asked_for_what_was_left_out(make_worker, kit):
    worker = await make_worker(kit.answers())
    worker.pages["/server_info"] = {
        "disaggregation_mode": "prefill",
        "disaggregation_bootstrap_port": 9077,
        "record": {"page_size": 32},
        "served_model_name": "m",
    }
    async with kit.router([], []) as router:
        error = (await post(router, told(worker, "decode"), 400))["error"]
        assert "it is a prefill worker" in error["message"]
        answer = await post(router, {"url": worker.url}, 202)
        assert (answer["worker"]["role"], answer["worker"]["bootstrap_port"]) == ("prefill", 9077)


async def test_changes_and_what_can_not_be_changed(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with kit.router([prefill], [decode]) as router:
        by_url = await listed(router)

        async def change(worker, body, status):
            url = f"{router.url}/workers/{by_url[worker.url]['id']}"
            async with router.client.patch(url, json=body) as response:
                assert response.status == status, await response.text()
                return await response.json()

        changed = await change(prefill, {"bootstrap_port": 9555, "labels": {"a": "b"}}, 200)
        assert changed["worker"]["labels"] == {"a": "b"}
        await served_by(router)
        assert prefill.seen[0].body["bootstrap_port"] == 9555
        await change(decode, {"bootstrap_port": 9555}, 400)
        await change(decode, {"url": "http://b:1"}, 400)
        async with router.client.put(router.url + "/workers/nobody", json={}) as response:
            assert response.status == 404


async def test_a_lease_that_is_not_renewed_ends(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with kit.router([prefill], []) as router:
        mine = told(decode, "decode", lease=1.0, instance_id="one")
        await post(router, mine, 202)
        await kit.eventually(lambda: router.server.registry.has_pair)
        await asyncio.sleep(0.6)
        assert (await post(router, mine, 200))["status"] == "renewed"
        await asyncio.sleep(0.6)
        assert decode.url in await listed(router)  # beyond the first lease, not the second
        await kit.eventually(lambda: not router.server.registry.has_pair)
        assert decode.url not in await listed(router)


async def test_a_new_process_on_the_same_address_begins_anew(make_worker, kit):
    prefill = await make_worker(kit.answers())
    decode = await make_worker(kit.answers())
    async with kit.router([prefill], []) as router:
        await post(router, told(decode, "decode", lease=60, instance_id="one"), 202)
        await kit.eventually(lambda: router.server.registry.has_pair)
        before = router.server.registry.by_url(decode.url)
        before.mark_down("as if")
        await post(router, told(decode, "decode", lease=60, instance_id="two"), 202)
        after = router.server.registry.by_url(decode.url)
        assert after is not before
        assert len(await listed(router)) == 2
        await kit.eventually(lambda: after.healthy)
        # The one before says goodbye late: that is not for its successor.
        url = f"{router.url}/workers/{after.id}"
        async with router.client.delete(url, params={"instance_id": "one"}) as response:
            assert response.status == 409
        async with router.client.delete(url, params={"instance_id": "two"}) as response:
            assert response.status == 202
        assert decode.url not in await listed(router)


async def test_a_worker_that_an_operator_removed_does_not_register_again(make_worker, kit):
    decode = await make_worker(kit.answers())
    async with kit.router([], []) as router:
        mine = told(decode, "decode", lease=60, instance_id="one")
        await post(router, mine, 202)
        async with router.client.delete(f"{router.url}/workers/{quote(decode.url, safe='')}") as response:
            assert response.status == 202
        assert (await post(router, mine, 409))["error"]["code"] == "worker_removed"
        await post(router, mine | {"instance_id": "two"}, 202)  # restarted
        async with router.client.delete(f"{router.url}/workers/{quote(decode.url, safe='')}"):
            pass
        await post(router, told(decode, "decode"), 202)  # or added by hand
        await post(router, mine | {"instance_id": "two"}, 200)


async def test_a_worker_from_a_flag_stays_though_it_registers(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with kit.router([prefill], [decode]) as router:
        await post(router, told(prefill, "prefill", bootstrap_port=9321, lease=1, instance_id="one"), 200)
        shown = (await listed(router))[prefill.url]
        assert (shown["origin"], shown["lease"], shown["bootstrap_port"]) == ("flag", None, 9321)
        await post(router, told(prefill, "prefill", bootstrap_port=9322, lease=1, instance_id="two"), 202)
        shown = (await listed(router))[prefill.url]
        assert (shown["origin"], shown["lease"], shown["bootstrap_port"]) == ("flag", None, 9322)


async def test_a_lease_given_by_hand_outlives_a_restart_of_its_worker(make_worker, kit):
    decode = await make_worker(kit.answers())
    async with kit.router([], []) as router:
        await post(router, told(decode, "decode", lease=60), 202)
        await post(router, told(decode, "decode", instance_id="one"), 200)
        await post(router, told(decode, "decode", instance_id="two"), 202)
        shown = (await listed(router))[decode.url]
        assert (shown["origin"], shown["lease"], shown["instance_id"]) == ("api", 60, "two")


async def test_only_the_admin_key_changes_workers(make_worker, kit):
    decode = await make_worker(kit.answers())
    keys = ("--api-key", "user-key", "--admin-api-key", "admin-key")
    user, admin = ({"Authorization": f"Bearer {key}"} for key in ("user-key", "admin-key"))
    async with kit.router([], [decode], *keys) as router:
        url = f"{router.url}/workers"
        one = f"{url}/{router.server.registry.workers[0].id}"
        requests = [("POST", url), ("DELETE", one), ("PUT", one), ("PATCH", one)]
        for headers, status in (({}, 401), (user, 403)):
            for method, where in requests:
                async with router.client.request(method, where, json={}, headers=headers) as response:
                    assert response.status == status
        async with router.client.get(url, headers=user) as response:
            assert response.status == 200
        async with router.client.delete(one, headers=admin) as response:
            assert response.status == 202


async def test_checks_in_a_row_decide_when_thresholds_are_set(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    answers = []
    flags = ("--health-failure-threshold", "3", "--health-success-threshold", "2")
    async with kit.router([prefill], [decode], *flags) as router:
        worker = router.server.registry.by_url(decode.url)
        client = router.server.session
        for task in list(router.server.registry._monitors.values()):  # polls by hand from here on
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        decode.health_status = 500
        for _ in range(3):
            answers.append(worker.healthy)
            await worker.poll(client)
        decode.health_status = 200
        for _ in range(2):
            answers.append(worker.healthy)
            await worker.poll(client)
        answers.append(worker.healthy)
    assert answers == [True, True, True, False, False, True]
