"""Made-up requests at every route, by the OpenAPI document and against it: no 5xx, no hang, nothing left."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.cluster import Cluster, Worker
from support.tiny_model import save_tiny_model

FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "4096", "--chunked-prefill-size", "64"),
    # Nothing that can be asked for takes long.
    *("--context-length", "96", "--max-n", "3", "--enable-fault-injection"),
)
SECONDS = 20.0
"""No request takes longer."""
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
GENERATING = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"}
NOT_AT_A_WORKER = GENERATING
"""One half of a pair would wait for the other. The router's routes are these, with both halves."""

ADDED = {"url": "http://127.0.0.1:1", "role": "decode"}
"""A worker that never answers, to be changed and removed in place of a real one."""

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3, "echo": True, "logprobs": 1, "n": 2},
    "/v1/responses": {"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 16},
    "/generate": {"text": ["Hi"], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True},
    "/tokenize": {"messages": [{"role": "user", "content": "Hi"}]},
    "/detokenize": {"tokens": [1, 2]},
    "/abort_request": {"rid": "x"},
    "/pause_generation": {"mode": "in_place"},
    "/start_profile": {"num_steps": 1, "profile_prefix": "p"},
    "/update_config": {"weight_version": "x", "log_level": "info"},
    "/update_weights_from_disk": {"model_path": "/nowhere", "load_format": "auto"},
    "/workers": ADDED | {"labels": {"a": "b"}, "lease": 5.0, "model_id": "m"},
    "/workers/{worker_id}": {"labels": {"a": "b"}, "lease": 5.0},
    "/faults": {"rules": [{"where": "send", "action": "delay", "seconds": 0.1}], "seed": 1},
}
"""A good body for each route that takes one."""

EDGES = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64, 10**40, 0.5, -0.5, 1e308, float("nan")),
    *("", "x", "\u0000", "a/b", "\ud800", "\u00e9" * 300, "http://127.0.0.1:1", "default"),
    *([], {}, [1], ["x"], [[1, 2]], [None], {"a": 1}, {"5": 1}, {"type": "text", "text": "x"}),
]
# Copies: what is drawn goes into bodies that are changed further.
LEAF = st.sampled_from(EDGES).map(copy.deepcopy) | st.integers() | st.floats() | st.text(max_size=20)
ANY_JSON = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)

Document = dict[str, Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(
        *FLAGS,
        *("--profile-dir", str(tmp_path_factory.mktemp("traces"))),
        model=str(save_tiny_model(tmp_path_factory.mktemp("tiny"))),
        environment={"HF_HUB_OFFLINE": "1"},  # nobody is asked for models whose names are made up
    )
    try:
        yield cluster
        cluster.close()
    finally:
        cluster.kill()


class Target:
    """One server, with its document and one connection to it. After each request that changes it, what was
    changed is put back, so that the next one meets a server that works."""

    def __init__(self, url: str, workers: set[str]) -> None:
        """`workers`: URLs of those that stay where they are."""
        self.url = url
        self._workers = workers
        self._session = requests.Session()
        self.document: Document = self.request("GET", "/openapi.json").json()
        self.schema = schemathesis.openapi.from_dict(self.document)
        self.schema.validate()
        self.statuses: dict[str, Counter[int]] = {}

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        return self._session.request(method, self.url + path, timeout=SECONDS, **options)

    def send(self, case: schemathesis.Case) -> None:
        response = case.call(base_url=self.url, session=self._session, timeout=SECONDS)
        self._count(case.path, response.status_code)
        case.validate_response(response, checks=CHECKS)
        self.put_back(case.path)

    def send_bytes(self, method: str, path: str, body: bytes) -> None:
        """`path` as in the document."""
        target = path
        if "{worker_id}" in path:
            target = "/workers/" + self.request("POST", "/workers", json=ADDED).json()["worker_id"]
        json_type = {"Content-Type": "application/json"}
        response = self.request(method, target, data=body, headers=json_type)
        self._count(path, response.status_code)
        assert response.status_code < 500, (method, target, body, response.text)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, (method, target, body, response.text)
        assert '"internal_error"' not in response.text, (method, target, body, response.text)
        self.put_back(path)

    def put_back(self, path: str) -> None:
        match path:
            case "/pause_generation":
                assert self.request("POST", "/continue_generation").ok
            case "/update_config":
                launched = {"served_model_name": None, "weight_version": None, "log_level": None}
                assert self.request("POST", "/update_config", json=launched).ok
            case "/faults":
                assert self.request("POST", "/faults", json={"rules": [], "release": True}).ok
            case "/workers" | "/workers/{worker_id}":
                for worker in self.request("GET", "/workers").json()["workers"]:
                    if worker["url"] not in self._workers:
                        assert self.request("DELETE", f"/workers/{worker['id']}").status_code == 202

    def body_schema(self, method: str, path: str) -> dict[str, Any]:
        """Empty if the operation takes no body, or one that isn't described by a component."""
        body = self.document["paths"][path][method.lower()].get("requestBody")
        reference = body and body["content"]["application/json"]["schema"].get("$ref")
        if not reference:
            return {}
        schema: dict[str, Any] = self.document["components"]["schemas"][reference.rpartition("/")[2]]
        return schema

    def _count(self, path: str, status: int) -> None:
        self.statuses.setdefault(path, Counter())[status] += 1


@pytest.fixture(scope="module")
def router(cluster: Cluster) -> Target:
    return Target(cluster.router.url, {worker.launched.url for worker in cluster.workers})


@pytest.fixture(scope="module", params=["prefill", "decode"])
def worker(request: pytest.FixtureRequest, cluster: Cluster) -> Target:
    chosen: Worker = {"prefill": cluster.prefill, "decode": cluster.decode}[request.param]
    return Target(chosen.launched.url, set())


@pytest.fixture(autouse=True)
def works_as_before(cluster: Cluster) -> Iterator[None]:
    """After each test the pools are at their baseline, and answers are those from before."""

    def answer() -> list[int]:
        parameters = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7, 8], "sampling_params": parameters}
        ids: list[int] = cluster.client.ok("/generate", body)["output_ids"]
        return ids

    before = answer()
    yield
    assert answer() == before
    cluster.flush()
    for one in cluster.workers:
        load = one.wait_until_idle()
        assert load["pages_free"] == load["pages_total"]
        assert "Traceback" not in one.launched.output
    assert "Traceback" not in cluster.router.output


def bounded(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same few examples each time."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def follow_the_document(target: Target, paths: set[str], examples: int) -> None:
    """schemathesis at every operation of these paths: bodies and parameters that fit the document, and some
    that don't."""
    for found in target.schema.get_all_operations():
        operation = found.ok()
        if operation.path in paths:
            follow_operation(target, operation, GenerationMode.POSITIVE, examples)
            if target.body_schema(operation.method, operation.path):
                follow_operation(target, operation, GenerationMode.NEGATIVE, examples)


def follow_operation(
    target: Target, operation: schemathesis.APIOperation, mode: GenerationMode, examples: int
) -> None:
    schema = target.body_schema(operation.method, operation.path)
    required = set(schema.get("required", ()))
    optional = sorted(schema.get("properties", {}).keys() - required)
    kept = st.sets(st.sampled_from(optional), max_size=3) if optional else st.just(set())

    @bounded(examples)
    @given(
        case=operation.as_strategy(mode), keep=kept, base=st.sampled_from([VALID.get(operation.path), None])
    )
    def fuzz(case: schemathesis.Case, keep: set[str], base: dict[str, Any] | None) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            # Of many fields at once some pair would always be refused, and most made-up prompts don't fit.
            made_up = {name: value for name, value in case.body.items() if name in required | keep}
            case.body = made_up if base is None else made_up | base
        target.send(case)

    fuzz()


def send_made_up_json(target: Target, paths: set[str], examples: int) -> None:
    """At every operation of these paths that changes or makes something: any JSON, good bodies with something
    changed in them, and bytes that are no JSON."""
    for path in sorted(paths):
        for method in sorted(target.document["paths"][path].keys() - {"get"}):
            make_up_bodies(target, method, path, examples)


def make_up_bodies(target: Target, method: str, path: str, examples: int) -> None:
    fields = sorted(target.body_schema(method, path).get("properties", {}))
    changed = mutated(VALID.get(path, {}), fields)

    @bounded(examples)
    @given(body=changed.map(encode) | changed.map(encode) | ANY_JSON.map(encode) | st.binary(max_size=40))
    def fuzz(body: bytes) -> None:
        target.send_bytes(method, path, body)

    fuzz()


def encode(value: object) -> bytes:
    """With NaN and lone surrogates, which no JSON may have, but some clients send."""
    return json.dumps(value).encode()


@st.composite
def mutated(draw: st.DrawFn, valid: dict[str, Any], fields: list[str]) -> Any:
    """`valid` with one to three changes; `fields` may be added."""
    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        inside = [path for path in places(body) if path]
        kind = draw(st.sampled_from(["add", "replace", "delete"]))
        if kind == "add" and fields:
            body[draw(st.sampled_from(fields))] = draw(ANY_JSON)
        elif inside:
            *way, last = draw(st.sampled_from(inside))
            at: Any = body
            for step in way:
                at = at[step]
            if kind == "delete":
                del at[last]
            else:
                at[last] = draw(ANY_JSON)
    return body


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to every value inside."""
    yield before
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inside:
        yield from places(entry, (*before, key))


def test_the_document_is_followed_by_every_generating_route(router: Target) -> None:
    title = router.body_schema("POST", "/v1/chat/completions").get("title")
    assert title == "ChatRequest", "the router's document has taken over the workers'"
    follow_the_document(router, GENERATING, 8)
    # Not all was refused: what is made up gets past the checks often enough to be run.
    assert sum(router.statuses[path][200] for path in GENERATING) >= 4, router.statuses


def test_the_document_is_followed_by_every_other_route_of_the_router(router: Target) -> None:
    follow_the_document(router, router.document["paths"].keys() - GENERATING, 5)


def test_the_document_is_followed_by_every_route_of_a_worker(worker: Target) -> None:
    follow_the_document(worker, worker.document["paths"].keys() - NOT_AT_A_WORKER, 3)


def test_no_json_makes_the_router_or_what_is_behind_it_fail(router: Target) -> None:
    send_made_up_json(router, set(router.document["paths"]), 20)
    reached = {path for path, statuses in router.statuses.items() if statuses[200] + statuses[202]}
    assert len(reached & set(VALID)) > len(VALID) / 2, router.statuses


def test_no_json_makes_a_worker_fail(worker: Target) -> None:
    send_made_up_json(worker, worker.document["paths"].keys() - NOT_AT_A_WORKER, 8)
