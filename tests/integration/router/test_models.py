"""Several models behind one router: what it lists, and which workers get a request for which."""

from __future__ import annotations


async def workers(make_worker, kit, prefills=1, decodes=1):
    made = [await make_worker(kit.answers()) for _ in range(prefills + decodes)]
    return made[:prefills], made[prefills:]


def model(name, length=100, **more):
    return {"id": name, "object": "model", "max_model_len": length, "root": f"/weights/{name}"} | more


def serves(worker, *models):
    worker.pages["/v1/models"] = {"object": "list", "data": list(models)}


async def call(router, method, path, data=None):
    async with router.client.request(method, router.url + path, json=data) as response:
        return response.status, await response.json()


async def test_models_are_those_that_both_sides_serve_each_once(make_worker, kit):
    prefills, decodes = await workers(make_worker, kit, 2, 2)
    serves(prefills[0], model("a", 50), model("b"))
    serves(prefills[1], model("a", 80))
    serves(decodes[0], model("a", 90, owned_by="us"), model("c"))
    serves(decodes[1], model("b", 70), model("a", 60))
    async with kit.router(prefills, decodes) as router:
        _, answer = await call(router, "GET", "/v1/models")
        assert answer == {"object": "list", "data": [model("a", 50, owned_by="us"), model("b", 70)]}
        assert await call(router, "GET", "/v1/models/b") == (200, model("b", 70))
        status, answer = await call(router, "GET", "/v1/models/c")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_request_goes_to_a_pair_that_serves_its_model(make_worker, kit):
    prefills, decodes = await workers(make_worker, kit, 2, 2)
    for number, name in enumerate(("a", "b")):
        serves(prefills[number], model(name))
        serves(decodes[number], model(name))
    async with kit.router(prefills, decodes) as router:
        for name in ("a", "b", "b", "/weights/a"):
            async with router.post(data={"model": name, "prompt": "hi"}) as response:
                assert response.status == 200
        assert [len(w.seen) for w in (*prefills, *decodes)] == [2, 2, 2, 2]
        async with router.post("/v1/chat/completions", {"model": "c", "messages": []}) as response:
            assert response.status == 404
            error = (await response.json())["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'a'" in error["message"]
        # One that names none may not be torn between two models.
        for _ in range(2):
            async with router.post("/generate", {"text": "hi"}) as response:
                assert response.status == 200
        assert [len(w.seen) for w in (*prefills, *decodes)] == [4, 2, 4, 2]
        status, answer = await call(router, "POST", "/tokenize", {"model": "b", "prompt": "hi"})
        assert (status, answer["worker"]) == (200, decodes[1].port)
        await decodes[1].stop()
        async with router.post(data={"model": "b", "prompt": "hi"}) as response:
            assert response.status in (502, 503)
        assert len(decodes[0].seen) == 4


async def test_weights_at_different_places_are_the_same_model(make_worker, kit):
    (prefill,), decodes = await workers(make_worker, kit, 1, 2)
    serves(prefill, model("a", root="/at/prefill"))
    serves(decodes[0], model("b"))
    serves(decodes[1], model("a", root="/at/decode"))
    async with kit.router([prefill], decodes) as router:
        for body in ({"text": "hi"}, {"text": "hi"}, {"text": "hi", "model": "a"}):
            async with router.post("/generate", body) as response:
                assert response.status == 200
    assert [len(w.seen) for w in decodes] == [0, 3]


async def test_a_name_that_one_side_is_not_known_by_is_for_its_workers_to_judge(make_worker, kit):
    """As when both were just renamed, and one of them has told the router."""
    (prefill,), (decode,) = await workers(make_worker, kit)
    serves(prefill, model("old"))
    serves(decode, model("new"))
    asked = {"model": "new", "prompt": "hi"}
    async with kit.router([prefill], [decode]) as router, router.post(data=asked) as response:
        assert response.status == 200
    assert len(prefill.seen) == 1


async def test_with_one_model_a_wrong_name_is_for_the_workers_to_refuse(make_worker, kit):
    (prefill,), (decode,) = await workers(make_worker, kit)
    serves(prefill, model("a"))
    serves(decode, model("a"))
    decode.script = prefill.script = kit.fails(404, "the worker's words")
    async with kit.router([prefill], [decode]) as router, router.post(data={"model": "z"}) as response:
        assert (await response.json())["error"]["message"] == "the worker's words"


async def test_a_new_name_is_noticed(make_worker, kit):
    (prefill,), (decode,) = await workers(make_worker, kit)
    serves(decode, model("a"))
    async with kit.router([prefill], [decode], "--health-interval", "0.02") as router:
        worker = router.server.registry.by_url(decode.url)
        assert worker.models == {"a", "/weights/a"}
        serves(decode, model("b"))
        await kit.eventually(lambda: worker.models == {"b", "/weights/b"})
