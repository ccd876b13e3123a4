"""The worker without a model: its cache counts like a real one, its answers parse, and rooms join two."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from diptych.bench.echo_worker import EchoSettings, EchoWorker
from diptych.bench.simulated_cache import SimulatedCache, prompts_of


def test_the_longest_run_of_shared_pages_is_cached():
    cache = SimulatedCache(capacity_pages=100, page_size=4)
    assert cache.match_and_insert(list(range(10))) == 0
    assert cache.match_and_insert([*range(10), 99]) == 8  # whole pages only
    assert cache.match_and_insert([*range(4), 7, 7, 7, 7, 8]) == 4
    assert cache.match_and_insert([9, *range(1, 10)]) == 0  # equal pages behind another start
    assert cache.match_and_insert(list(range(8))) == 7  # the last token is always computed


def test_what_is_used_least_leaves_first_and_from_the_end():
    cache = SimulatedCache(capacity_pages=4, page_size=1)
    cache.match_and_insert([1, 2, 3])
    cache.match_and_insert([5, 6])
    assert len(cache) == 4
    assert cache.match_and_insert([1, 2, 3, 4]) == 2


@pytest.mark.parametrize(
    ("path", "fields", "prompts"),
    [
        ("/v1/completions", {"prompt": [1, 2]}, [[1, 2]]),
        ("/v1/completions", {"prompt": [[1], [2, 3]]}, [[1], [2, 3]]),
        ("/generate", {"input_ids": [4]}, [[4]]),
        ("/generate", {"text": ["a", "b"]}, [[97], [98]]),
    ],
)
def test_prompts_are_found_in_every_form(path, fields, prompts):
    assert prompts_of(path, fields) == prompts


async def test_streams_have_as_many_tokens_as_asked_for_and_count_cached_ones():
    worker = EchoWorker(EchoSettings(page_size=4))
    await worker.start()
    try:
        async with aiohttp.ClientSession(worker.url) as client:
            body = {
                "prompt": list(range(9)),
                "max_tokens": 3,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            usages = []
            for _ in range(2):
                async with client.post("/v1/completions", json=body) as response:
                    events = (await response.read()).split(b"\n\n")
                assert events[-2:] == [b"data: [DONE]", b""]
                parsed = [json.loads(e.removeprefix(b"data: ")) for e in events[:-2]]
                assert sum(bool(e["choices"]) for e in parsed) == 3
                usages.append(parsed[-1]["usage"])
            assert [u["completion_tokens"] for u in usages] == [3, 3]
            assert [u["prompt_tokens_details"]["cached_tokens"] for u in usages] == [0, 8]
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 2}
            async with client.post("/v1/chat/completions", json=chat) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == " tok tok"
            async with client.post("/v1/completions", json={"prompt": 3}) as response:
                assert response.status == 400
    finally:
        await worker.stop()


async def test_a_decode_worker_that_awaits_prefill_answers_after_it_with_its_cached_tokens():
    prefill = EchoWorker(EchoSettings(role="prefill", page_size=1))
    decode = EchoWorker(EchoSettings(role="decode", await_prefill=True))
    await prefill.start()
    await decode.start()
    try:
        prefill.cache.match_and_insert([1, 2, 3])
        body = {
            "input_ids": [1, 2, 3, 4],
            "sampling_params": {"max_new_tokens": 2},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.port,
            "bootstrap_room": 5,
        }
        async with aiohttp.ClientSession() as client:
            waiting = asyncio.create_task(client.post(decode.url + "/generate", json=body).__aenter__())
            async with client.post(prefill.url + "/generate", json=body) as response:
                assert (await response.json())["meta_info"]["completion_tokens"] == 1
            meta = (await (await waiting).json())["meta_info"]
        assert (meta["cached_tokens"], meta["completion_tokens"]) == (3, 2)
    finally:
        await decode.stop()
        await prefill.stop()
