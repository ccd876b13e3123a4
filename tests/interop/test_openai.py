"""The `openai` package sees the same answers as plain HTTP: whole and streamed, sync and async."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.answers import wait_until
from support.client import Client
from support.cluster import MODEL
from support.processes import Launched

from .conftest import ClientEnvironment, Local
from .reassembled import reassembled, unchanging
from .requests_of_each_kind import CITY, QUESTION, REQUESTS

WAYS = ["sync", "async", "sync streamed", "async streamed"]
ROUTES = {
    resource: "/v1/" + resource.replace(".", "/")
    for resource in ("chat.completions", "completions", "responses")
}


@pytest.fixture(scope="module")
def over_http(local: Local) -> dict[str, Any]:
    """Whole answers by name."""
    groups = {
        resource: [name for name, asked in REQUESTS.items() if asked[0] == resource] for resource in ROUTES
    }
    found = {}
    for resource, names in groups.items():
        answers = local.client.post_all(ROUTES[resource], [REQUESTS[name][1] for name in names])
        for name, (status, answer) in zip(names, answers, strict=True):
            assert status == 200, f"{name}: {answer}"
            found[name] = answer
    return found


@pytest.fixture(scope="module")
def seen(
    clients: ClientEnvironment, local: Local, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """By way and name."""
    found: dict[str, Any] = clients.script(
        "openai_requests.py", local.url, REQUESTS, tmp_path_factory.mktemp("openai")
    )
    assert list(found) == WAYS
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_every_way_of_asking_gives_the_same(
    name: str, over_http: dict[str, Any], seen: dict[str, Any]
) -> None:
    expected = unchanging(over_http[name])
    ways = [way for way in WAYS if name in seen[way]]
    assert len(ways) >= (1 if "best_of" in name else 2)
    for way in ways:
        answer = seen[way][name]
        if way.endswith("streamed"):
            answer = reassembled(answer)
        assert unchanging(answer) == expected, way


def test_what_was_asked_for_was_done(over_http: dict[str, Any]) -> None:
    """Equal answers could be equally wrong."""

    def choices(name: str) -> list[dict[str, Any]]:
        return over_http[name]["choices"]

    assert choices("chat")[0]["message"]["content"] == "The capital of France is Paris."
    assert choices("chat stop")[0]["message"]["content"] == "The capital of France"
    assert not choices("chat logit_bias")[0]["message"]["content"].startswith("The")
    assert [len(step["top_logprobs"]) for step in choices("chat logprobs")[0]["logprobs"]["content"]] == [
        3
    ] * 4
    assert len({choice["message"]["content"] for choice in choices("chat n")}) == 2
    (city,) = choices("chat json_schema")
    assert json.loads(city["message"]["content"]).keys() == CITY["properties"].keys()
    assert choices("chat regex")[0]["message"]["content"] in ("yes", "no")
    for name in ("chat tool required", "chat tool named"):
        (choice,) = choices(name)
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], call["function"]["name"]) == (
            "tool_calls" if "required" in name else "stop",
            "weather",
        )
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Berlin")
    assert [choice["index"] for choice in choices("completion batch")] == [0, 1]
    assert len(choices("completion best_of")) == 2
    (echoed,) = choices("completion of nothing but the prompt")
    assert (echoed["text"], echoed["logprobs"]["tokens"]) == ("The sea", ["The", " sea"])
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert over_http["response"]["output"][0]["content"][0]["text"] == "The capital of France is Paris."


def test_the_packages_helpers_work(
    clients: ClientEnvironment, local: Local, over_http: dict[str, Any], tmp_path: Path
) -> None:
    """Classes from answers of a given form, from calls too, and streams that add themselves up."""
    found = clients.script("openai_helpers.py", local.url, {"model": MODEL, "messages": QUESTION}, tmp_path)
    answer = over_http["chat"]["choices"][0]["message"]["content"]
    assert found["parsed"]["name"] in ("Paris", "Berlin")
    assert found["called"] == "City"
    assert found["response"] == answer
    assert found["events"] == ["response.created", "response.completed"]
    assert found["raw"] == [200, "application/json", answer]


@pytest.fixture(scope="module")
def keyed() -> Iterator[Launched]:
    """A router that wants a key, and has no workers."""
    router = Launched("launch-router", "--port", "0", "--api-key", "right")
    try:
        router.url = router.wait_for_line(r"listening on port (\d+)").expand(r"http://127.0.0.1:\1")
        yield router
    finally:
        router.stop()


def test_refusals_are_the_packages_exceptions(
    clients: ClientEnvironment, local: Local, keyed: Launched, tmp_path: Path
) -> None:
    found = clients.script("openai_errors.py", local.url, {"keyed": keyed.url}, tmp_path)
    assert found["models"] == [MODEL]
    assert (found["model"]["id"], found["model"]["object"]) == (MODEL, "model")
    assert found["request id"]
    refused = found["refused"]
    assert {name: (error["class"], error["status"], error["param"]) for name, error in refused.items()} == {
        "unknown model": ("NotFoundError", 404, "model"),
        "unknown model looked up": ("NotFoundError", 404, "model"),
        "negative max_tokens": ("BadRequestError", 400, "max_tokens"),
        "a streamed one": ("BadRequestError", 400, "temperature"),
        "audio": ("BadRequestError", 400, "modalities"),
        "no such route": ("NotFoundError", 404, None),
        "too long": ("BadRequestError", 400, "prompt"),
        "wrong key": ("AuthenticationError", 401, None),
        "right key, no workers": ("InternalServerError", 503, None),
    }
    for name, error in refused.items():
        assert error["request_id"], name
    # The stream that was left doesn't run to its 4,000 tokens.
    decode = Client(local.decode_url)
    wait_until(
        lambda: decode.get("/server_info")[1]["load"]["num_running_reqs"] == 0, "decode has let go of it", 5
    )
