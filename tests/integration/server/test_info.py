from __future__ import annotations

import asyncio

import pytest

from .conftest import Client, Worker, chat, say

MODEL = "smollm2-135m-instruct"


async def test_models_are_listed(client: Client):
    _, answer = await client.get("/v1/models")
    (model,) = answer["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 8192)
    assert (await client.get(f"/v1/models/{MODEL}"))[1] == model
    assert (await client.get("/v1/models/other"))[0] == 404


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_has_record_provenance_and_both_processes(client: Client, path: str):
    _, info = await client.get(path)
    assert info["record"]["model_path"] == MODEL
    assert info["provenance"]["model_path"] == "flag: --model-path"
    assert info["provenance"]["port"] == "derived: listening sockets"
    assert str(info["record"]["port"]) == client.url.rsplit(":", 1)[1]
    assert info["frontend"]["bags"]["serving"]["port"] == info["record"]["port"]
    assert info["scheduler"]["role"] == "colocated_scheduler"
    assert info["engine_overlay"] == {"values": {}, "updates": []}
    # What routers read, in the types they expect.
    assert isinstance(info["model_path"], str)
    assert isinstance(info["served_model_name"], str)
    assert info["dp_size"] == 1
    assert isinstance(info["version"], str)
    assert all(isinstance(value, int) for name, value in info.items() if name.startswith("max_"))


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_describes_the_model(client: Client, path: str):
    _, info = await client.get(path)
    assert info["model_type"] == "llama"
    assert info["architectures"] == ["LlamaForCausalLM"]
    assert info["is_generation"] is True
    assert info["tokenizer_path"] == MODEL


async def test_load_counts_running_requests(client: Client):
    task = asyncio.create_task(client.post("/v1/completions", {"prompt": say("a b c d", delay=0.1), "n": 2}))
    await client.until_running(2)
    _, load = await client.get("/get_load")
    assert load == [{"dp_rank": 0, "num_reqs": 2, "num_waiting_reqs": 0, "num_tokens": 7}]
    await task


async def test_metrics_join_both_processes(client: Client):
    await client.post("/v1/completions", {"prompt": say("a b c")})
    async with client.session.get(client.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        lines = (await response.text()).splitlines()
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}
    assert values["scripted_scheduler"] == 1.0
    assert values['diptych_http_requests_total{route="/v1/completions",status="200"}'] >= 1
    assert values["diptych_frontend_running_samples"] == 0
    assert values["diptych_frontend_time_to_first_token_seconds_count"] >= 1
    assert values["diptych_frontend_inter_token_latency_seconds_count"] >= 1
    assert values["diptych_frontend_output_tokens_total"] >= 4
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


async def test_health_is_open_and_generating_health_generates(client: Client):
    async with client.session.get(client.url + "/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    before = len(await client.received())
    async with client.session.get(client.url + "/health_generate") as response:
        assert response.status == 200
    assert [message["type"] for message in (await client.received())[before:]] == ["generate"]


async def test_half_of_a_pair_is_healthy_without_generating(prefill: Worker, decode: Worker, session):
    for worker in (prefill, decode):
        async with session.get(worker.url + "/health_generate") as response:
            assert response.status == 200


async def test_flush_is_done_when_idle_and_refused_when_not(client: Client):
    assert (await client.post("/flush_cache"))[0] == 200
    task = asyncio.create_task(client.post("/v1/completions", {"prompt": say("a b c d", delay=0.1)}))
    await client.until_running(1)
    status, answer = await client.post("/flush_cache")
    assert (status, answer["error"]["message"]) == (400, "requests are running")
    await task


async def test_tokenize_and_detokenize_are_inverse(client: Client):
    text = "Naïve 世界 😀"
    _, tokens = await client.post("/tokenize", {"prompt": text})
    assert tokens["count"] == len(tokens["tokens"])
    assert (await client.post("/detokenize", {"tokens": tokens["tokens"]}))[1]["text"] == text
    _, batch = await client.post("/tokenize", {"prompt": [text, "x"]})
    assert batch["count"] == [tokens["count"], 1]
    assert (await client.post("/detokenize", {"tokens": batch["tokens"]}))[1]["text"] == [text, "x"]
    status, answer = await client.post("/detokenize", {"tokens": [99999999]})
    assert (status, answer["error"]["param"]) == (400, "tokens")


async def test_messages_are_tokenized_as_chat_does(client: Client):
    body = chat("x")
    _, tokens = await client.post("/tokenize", {"messages": body["messages"]})
    _, answer = await client.post("/v1/chat/completions", body)
    assert answer["usage"]["prompt_tokens"] == tokens["count"]


async def test_a_key_is_required_everywhere_but_for_health(make_worker, session):
    worker = make_worker("colocated", "--api-key", "s3cret", "--served-model-name", "own/name")
    client = Client(worker.url, session)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
        for path in ("/v1/models", "/get_load", "/server_info", "/nowhere"):
            status, answer = await client.get(path, headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        status, _ = await client.post("/v1/chat/completions", chat("x"), headers=headers)
        assert status == 401
    assert (await session.get(worker.url + "/health")).status == 200
    key = {"Authorization": "Bearer s3cret"}
    status, answer = await client.post("/v1/chat/completions", chat("x", model="own/name"), headers=key)
    assert (status, answer["model"]) == (200, "own/name")
    assert (await client.get("/v1/models/own/name", headers=key))[0] == 200
    async with session.get(worker.url + "/server_info", headers=key) as response:
        assert "s3cret" not in await response.text()


async def test_a_request_is_named_in_its_answer_and_by_its_client(client: Client):
    url = client.url + "/v1/chat/completions"
    for body in (chat("hi"), chat("hi", stream=True)):
        async with client.session.post(url, json=body, headers={"X-Request-Id": "mine 1"}) as response:
            assert response.headers["X-Request-Id"] == "mine 1"
    async with client.session.get(client.url + "/nope") as response:
        assert len(response.headers["X-Request-Id"]) == 32
