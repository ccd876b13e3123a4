"""Everything a client can see is the same from router-over-PD and from one colocated worker: a row per field
of each route (`table.py`), whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
from support.client import Client
from support.cluster import Cluster, Colocated
from support.oracle import greedy_oracle

from diptych.server import requests
from diptych.server.responses_request import REFUSED, ResponsesRequest

from .answers import READ, comparable, names
from .asking import EVERYTHING, Reply, ask_all, reply
from .chat_rows import LONG, QUESTION
from .rows import Fields, Refused
from .table import ROUTES

FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "32"),
    *("--served-model-name", "tiny", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
    *("--default-max-tokens", "16"),
)


@pytest.fixture(scope="module")
def disaggregated(tiny: Path) -> Iterator[Cluster]:
    cluster = Cluster(*FLAGS, model=str(tiny))
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def colocated(tiny: Path) -> Iterator[Colocated]:
    colocated = Colocated(*FLAGS, model=str(tiny))
    yield colocated
    colocated.close()


# ---- the table ------------------------------------------------------------------------------------------


Replies = dict[int, tuple[Reply, Reply]]
"""By position in EVERYTHING: what the disaggregated cluster answered, and the colocated worker."""


@pytest.fixture(scope="module")
def replies(disaggregated: Cluster, colocated: Colocated) -> Replies:
    async def ask(server: str) -> list[Reply]:
        # Each prompt once before, so that `cached_tokens` doesn't depend on who came first.
        await ask_all(server, [*{asked.prompt: asked for asked in EVERYTHING}.values()])
        return await ask_all(server, EVERYTHING)

    async def ask_both() -> list[list[Reply]]:
        return await asyncio.gather(*(ask(served.client.url) for served in (disaggregated, colocated)))

    return dict(enumerate(zip(*asyncio.run(ask_both()), strict=True)))


@pytest.mark.parametrize(
    ("route", "row"),
    [pytest.param(path, row, id=f"{path}:{row}") for path in ROUTES for row in ROUTES[path].rows],
)
def test_field(replies: Replies, route: str, row: str) -> None:
    whole: Reply = (0, None)
    for number, asked in enumerate(EVERYTHING):
        if (asked.route, asked.row) != (route, row):
            continue
        ours, theirs = replies[number]
        where = f"{asked.variant} {'streamed' if asked.streamed else ''}"
        assert ours[0] == theirs[0], (where, ours, theirs)
        if isinstance(asked.variant, Refused):
            assert ours == theirs, where
            _assert_refused(ours, asked.variant, row, where)
        elif isinstance(ours[1], list) and asked.streamed:
            _assert_streams_say(route, ours[1], theirs[1], whole[1], where)
        else:
            assert comparable(ours[1]) == comparable(theirs[1]), where
            if not asked.streamed:
                assert ours[0] == 200, (where, ours)
                whole = ours


def _assert_refused(reply: Reply, variant: Refused, row: str, where: str) -> None:
    status, body = reply
    error = body["error"]
    assert status == variant.status, (where, error)
    assert (error["param"] or "").startswith(variant.param or row), (where, error)


def _assert_streams_say(route: str, ours: list[Any], theirs: list[Any], whole: Any, where: str) -> None:
    read_whole, read_stream = READ[route]
    assert names(ours) == names(theirs), where
    assert read_stream(ours) == read_stream(theirs), where
    assert read_stream(ours) == read_whole(whole), where
    assert _usages(ours) == _usages(theirs), where


def _usages(events: list[Any]) -> Any:
    """The last word on usage."""
    return next((event["usage"] for event in reversed(events) if event.get("usage")), None)


STRUCTS = {
    "/v1/chat/completions": requests.ChatRequest,
    "/v1/completions": requests.CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/generate": requests.GenerateRequest,
}
PAIR_FIELDS = {"bootstrap_host", "bootstrap_port", "bootstrap_room"}
"""The router's: `tests/integration/server/test_pairing.py`."""


@pytest.mark.parametrize("route", ROUTES)
def test_every_declared_field_has_a_row(route: str) -> None:
    declared = {field.encode_name for field in msgspec.structs.fields(STRUCTS[route])}
    declared |= requests.UNSUPPORTED.keys()
    if route == "/generate":
        fields = msgspec.structs.fields(requests.NativeSampling)
        declared |= {f"sampling_params.{field.encode_name}" for field in fields}
    if route == "/v1/responses":
        declared |= REFUSED.names
    assert declared - PAIR_FIELDS - ROUTES[route].rows.keys() == set()


# ---- other routes, and bodies that are no requests -----------------------------------------------------

BODIES: dict[str, Any] = {
    "not json": b"{not json",
    "empty": b"",
    "a list": b"[1, 2]",
    "a string": b'"text"',
    "invalid utf-8": b'{"prompt": "\xff\xfe"}',
    "an empty object": b"{}",
}
OTHERS: dict[str, tuple[str, Any]] = {
    "tokenize": ("/tokenize", {"prompt": "The lighthouse 世界"}),
    "tokenize several": ("/tokenize", {"prompt": ["a", "b c"], "add_special_tokens": False}),
    "tokenize messages": ("/tokenize", {"messages": QUESTION, "add_generation_prompt": False}),
    "tokenize nothing": ("/tokenize", {}),
    "tokenize both": ("/tokenize", {"prompt": "a", "messages": QUESTION}),
    "tokenize a number": ("/tokenize", {"prompt": 7}),
    "tokenize for another model": ("/tokenize", {"prompt": "a", "model": "x"}),
    "tokenize long": ("/tokenize", {"prompt": LONG}),
    "detokenize": ("/detokenize", {"tokens": [504, 2365, 2], "skip_special_tokens": False}),
    "detokenize several": ("/detokenize", {"tokens": [[504], [2365, 2]]}),
    "detokenize nothing": ("/detokenize", {}),
    "detokenize an id too big": ("/detokenize", {"tokens": [10**6]}),
    "detokenize a mixture": ("/detokenize", {"tokens": [1, [2]]}),
    **{f"{route}: {name}": (route, body) for route in ROUTES for name, body in BODIES.items()},
}
PAGES = [
    "/v1/models",
    "/v1/models/tiny",
    "/v1/models/nobody/knows-it",
    "/model_info",
    "/nothing",
    "/generate",
]


@pytest.fixture(scope="module")
def other_replies(disaggregated: Cluster, colocated: Colocated) -> dict[str, tuple[Reply, Reply]]:
    async def ask(server: str) -> list[Reply]:
        async with aiohttp.ClientSession() as session:
            posted = [await reply(session, server + path, body) for path, body in OTHERS.values()]
            pages = []
            for path in PAGES:
                async with session.get(server + path) as response:
                    pages.append((response.status, await response.json()))
            return posted + pages

    both = (asyncio.run(ask(served.client.url)) for served in (disaggregated, colocated))
    return dict(zip([*OTHERS, *PAGES], zip(*both, strict=True), strict=True))


@pytest.mark.parametrize("case", [*OTHERS, *PAGES])
def test_other_routes_and_bodies(other_replies: dict[str, tuple[Reply, Reply]], case: str) -> None:
    ours, theirs = (comparable(reply) for reply in map(list, other_replies[case]))
    assert ours == theirs
    assert ours[0] < 500


# ---- what the router alone must get right --------------------------------------------------------------


def scored(client: Client, prompts: Any, **fields: Any) -> list[Any]:
    """As evaluation harnesses ask; the logprobs of each choice."""
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234, **fields}
    choices = client.ok("/v1/completions", body)["choices"]
    return [choice["logprobs"] for choice in sorted(choices, key=lambda choice: choice["index"])]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scored_prompts_have_the_log_likelihoods_of_transformers(
    disaggregated: Cluster, tiny: Path, max_tokens: int
) -> None:
    oracle = greedy_oracle(tiny)
    prompts = [
        [(17 + 31 * i * (i + seed)) % 49000 for i in range(size)] for seed, size in enumerate((2, 33, 400))
    ]
    batch = scored(disaggregated.client, prompts, max_tokens=max_tokens)
    for ids, logprobs in zip(prompts, batch, strict=True):
        expected = oracle.logprobs(ids)
        assert logprobs["token_logprobs"][0] is None
        given = torch.tensor(logprobs["token_logprobs"][1 : len(ids)])
        assert torch.allclose(given, expected[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-3)
        best = torch.tensor([max(top.values()) for top in logprobs["top_logprobs"][1 : len(ids)]])
        assert torch.allclose(best, expected[:-1].max(dim=1).values, atol=1e-3)
        assert len(logprobs["tokens"]) == len(ids) + max_tokens
        if max_tokens:
            assert logprobs["token_logprobs"][-1] == pytest.approx(float(expected[-1].max()), abs=1e-3)
    # Alone, and again with the pages cached, it is the same; so is the batch as a stream.
    assert scored(disaggregated.client, prompts[1], max_tokens=max_tokens) == [batch[1]]
    events = disaggregated.client.events(
        "/v1/completions",
        {"prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": max_tokens},
    )
    streamed = READ["/v1/completions"][1](events)
    assert [streamed[index]["logprobs"] for index in range(len(prompts))] == batch


def test_cached_tokens_are_those_that_prefill_had(disaggregated: Cluster) -> None:
    disaggregated.flush()
    ids = list(range(3000, 3050))
    body = {"prompt": ids, "max_tokens": 2}
    used = [disaggregated.client.ok("/v1/completions", body)["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in used]
    assert cached == [0, 48]


def test_a_seed_draws_the_same_in_a_crowd(disaggregated: Cluster) -> None:
    def body(seed: int) -> Fields:
        return {"prompt": "Once upon a time", "seed": seed, "max_tokens": 24}

    alone = disaggregated.client.ok("/v1/completions", body(7))["choices"][0]["text"]
    crowd = disaggregated.client.post_all("/v1/completions", [body(seed) for seed in range(12)], stagger=0.02)
    texts = [answer["choices"][0]["text"] for _, answer in crowd]
    assert texts[7] == alone
    assert len(set(texts)) > 8
