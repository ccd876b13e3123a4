"""Answers of workers that tell of the prompt on prefill alone, as they come out of the router."""

from __future__ import annotations

import asyncio
import json

import pytest

PROMPT = {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None]]}
NATIVE = {"text": "hi", "return_logprob": True, "logprob_start_len": 0}
ECHO = {"model": "m", "prompt": "ab", "echo": True, "logprobs": 1}


def native(text, prompt=None, **more):
    return {"text": text, "meta_info": {"output_token_logprobs": []} | (prompt or {})} | more


def choice(tokens, values, index=0, text=None):
    lists = {"tokens": tokens, "token_logprobs": values, "top_logprobs": [None] * len(tokens)}
    return {"choices": [{"index": index, "text": text or "".join(tokens), "logprobs": lists}]}


def events(body):
    return [json.loads(part[6:]) for part in body.split(b"\n\n") if part and part != b"data: [DONE]"]


def after(gate, script):
    async def wait(request, seen):
        await gate.wait()
        return await script(request, seen)

    return wait


@pytest.mark.parametrize(
    ("path", "body", "prefill", "decode", "merged"),
    [
        ("/generate", NATIVE, native("p", PROMPT), native("d"), native("d", PROMPT)),
        ("/generate", NATIVE, [native("p", PROMPT)] * 2, [native("d")] * 2, [native("d", PROMPT)] * 2),
        (
            "/v1/completions",
            ECHO,
            choice(["a", "b", "c"], [None, -1.0, -2.0]),
            choice(["c", "d"], [-2.0, -3.0]),
            choice(["a", "b", "c", "d"], [None, -1.0, -2.0, -3.0], text="cd"),
        ),
    ],
)
async def test_a_plain_answer_is_completed_once_prefill_has_answered(
    make_worker, kit, path, body, prefill, decode, merged
):
    gate = asyncio.Event()
    workers = (
        await make_worker(after(gate, kit.answers(data=prefill))),
        await make_worker(kit.answers(data=decode)),
    )
    async with kit.router([workers[0]], [workers[1]]) as router:
        asked = asyncio.create_task(router.client.post(router.url + path, json=body))
        await workers[1].wait_for_requests(1)
        gate.set()
        async with await asked as response:
            answer = await response.json()
            assert int(response.headers["Content-Length"]) == len(await response.read())
    assert answer == merged


async def test_every_event_of_a_native_stream_is_completed(make_worker, kit):
    prefill = await make_worker(kit.streams([kit.event(native("p", PROMPT)), kit.event(b"[DONE]")]))
    first, second = kit.event(native("d", index=0)), kit.event(native("de", index=0))
    cut = first[:20], first[20:] + second[:7], second[7:]  # as the network likes
    decode = await make_worker(kit.streams([*cut, kit.event(b"[DONE]")]))
    async with kit.router([prefill], [decode]) as router, router.post("/generate", NATIVE) as response:
        body = await response.read()
    assert body.endswith(b"data: [DONE]\n\n")
    assert events(body) == [native("d", PROMPT, index=0), native("de", PROMPT, index=0)]


async def test_the_first_piece_of_each_echoed_stream_gets_the_prompt(make_worker, kit):
    prefill = await make_worker(kit.streams([kit.event(choice(["a", "b", "c"], [None, -1.0, -2.0]))]))
    pieces = [choice(["c"], [-2.0]), choice(["d"], [-3.0])]
    decode = await make_worker(kit.streams([*map(kit.event, pieces), kit.event(b"[DONE]")]))
    async with kit.router([prefill], [decode]) as router, router.post(data=ECHO) as response:
        got = events(await response.read())
    tokens = [e["choices"][0]["logprobs"]["tokens"] for e in got]
    assert tokens == [["a", "b", "c"], ["d"]]


@pytest.mark.parametrize("asked", [NATIVE, NATIVE | {"logprob_start_len": -1}])
async def test_what_lacks_nothing_does_not_wait_for_prefill(make_worker, kit, asked):
    """Ours: decode has the prompt's, or nobody asked for them. The bytes stay decode's."""
    gate = asyncio.Event()
    prefill = await make_worker(after(gate, kit.answers(data=native("p"))))
    has = PROMPT if asked["logprob_start_len"] == 0 else {"input_token_logprobs": []}
    sent = [b'data: {"meta_info":  ' + json.dumps(has).encode() + b" }\n\n", kit.event(b"[DONE]")]
    decode = await make_worker(kit.streams(sent))
    async with kit.router([prefill], [decode]) as router, router.post("/generate", asked) as response:
        assert await response.read() == b"".join(sent)
        gate.set()


async def test_prefill_that_fails_fails_what_lacks_its_part(make_worker, kit):
    prefill = await make_worker(kit.fails(500, "out of luck"))
    decode = await make_worker(kit.streams([kit.event(native("d"))], then=kit.hangs))
    async with kit.router([prefill], [decode]) as router, router.post("/generate", NATIVE) as response:
        body = await response.read()
        assert response.status == 502 or b"out of luck" in body


async def test_workers_that_have_nothing_to_add_are_relayed_as_they_are(make_worker, kit):
    prefill = await make_worker(kit.answers(data=native("p")))
    sent = [kit.event(native("d", index=0)), b": a comment\n\n", kit.event(b"[DONE]")]
    decode = await make_worker(kit.streams(sent))
    async with kit.router([prefill], [decode]) as router, router.post("/generate", NATIVE) as response:
        assert await response.read() == b"".join(sent)
