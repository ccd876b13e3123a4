"""Answers that must match a grammar, from real workers: each matches, and a pair answers like one worker."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.cluster import Cluster, Colocated
from support.schemas import random_schema
from support.tiny_model import VOCABULARY, save_tiny_model

from diptych.engine.grammar.vocabulary import Vocabulary

SCHEMAS = 200
MAX_TOKENS = 80
ALONE = 50
"""Of the schemas, those whose answers are compared with a single worker's."""
AT_ONCE = 100
"""Requests; some of them run at a time."""
FLAGS = ("--max-running-requests", "16", "--page-size", "4", "--grammar-compile-timeout", "0.3")
SMALL_POOL = ("--max-total-tokens", "192", "--num-reserved-decode-tokens", "0")
"""For decode: samples are parked in the middle of their grammars."""

ENDLESS = {"type": "object", "properties": {f"name {i}": {"type": "string"} for i in range(3000)}}
AMBIGUOUS = 'root ::= x x x x x x x x\nx ::= x x | [a-z]* | "a"'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": {"enum": ["go", "stay"]}},
        "end": "</call>",
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """It answers nonsense, which only a grammar can bring into shape."""
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def cluster(model: str) -> Iterator[Cluster]:
    cluster = Cluster(*FLAGS, "--max-total-tokens", "16384", decode_flags=SMALL_POOL, model=model)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def colocated(model: str) -> Iterator[Colocated]:
    colocated = Colocated(*FLAGS, "--max-total-tokens", "16384", model=model)
    yield colocated
    colocated.close()


@pytest.fixture(scope="module")
def blanks(model: str) -> dict[str, int]:
    """A bias against tokens of blanks only, which this model would string together: answers stay short."""
    vocabulary = Vocabulary.from_dir(Path(model), VOCABULARY)
    return {str(i): -100 for i, token in enumerate(vocabulary.tokens) if token and not token.strip()}


def schema_body(seed: int, schema: dict[str, Any], blanks: dict[str, int]) -> dict[str, Any]:
    wrapped = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    return {
        "prompt": f"Number {seed}:",
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "response_format": wrapped,
        "logit_bias": blanks,
    }


def answers_of(served: Cluster | Colocated, number: int, blanks: dict[str, int]) -> list[tuple[Any, Any]]:
    """The first schemas, each with the answer to it."""
    found: list[tuple[Any, Any]] = []
    for start in range(0, number, AT_ONCE):
        schemas = {seed: random_schema(seed) for seed in range(start, min(start + AT_ONCE, number))}
        bodies = [schema_body(seed, schema, blanks) for seed, schema in schemas.items()]
        answered = served.client.post_all("/v1/completions", bodies)
        for schema, (status, answer) in zip(schemas.values(), answered, strict=True):
            assert status == 200, (schema, answer)
            found.append((schema, answer["choices"][0] | answer["usage"]))
    return found


@pytest.fixture(scope="module")
def answers(cluster: Cluster, blanks: dict[str, int]) -> list[tuple[Any, Any]]:
    return answers_of(cluster, SCHEMAS, blanks)


def test_every_finished_answer_is_valid(answers: list[tuple[Any, Any]]) -> None:
    finished = 0
    for schema, answer in answers:
        if answer["finish_reason"] == "stop":
            Draft202012Validator(schema).validate(json.loads(answer["text"]))
            finished += 1
        else:
            assert answer["finish_reason"] == "length"
    assert finished >= 0.7 * SCHEMAS, f"only {finished} of {SCHEMAS} answers were finished"


def test_a_pair_answers_like_one_worker_also_where_samples_were_parked(
    answers: list[tuple[Any, Any]], cluster: Cluster, colocated: Colocated, blanks: dict[str, int]
) -> None:
    alone = answers_of(colocated, ALONE, blanks)
    for (schema, ours), (_, theirs) in zip(answers[:ALONE], alone, strict=True):
        assert ours["text"] == theirs["text"], schema
        assert ours["finish_reason"] == theirs["finish_reason"]
        assert ours["completion_tokens"] == theirs["completion_tokens"]
    assert cluster.decode.client.metrics()["diptych_retractions_total"] > 0


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "[a-c]{3}-[0-9]+!"}, r"[a-c]{3}-[0-9]+!"),
    "choice": ({"guided_choice": ["left", "right", 'a "b"\n']}, r'left|right|a "b"\n'),
    "ebnf": ({"ebnf": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
    "lark": ({"guided_grammar": 'start: "u" | "v" "w"'}, r"u|vw"),
    "structural tag": ({"structural_tag": json.dumps(TAG)}, r'<call>"(go|stay)"</call>'),
    "json": ({"guided_json": {"enum": [1, "two"]}}, r'1|"two"'),
    "structured outputs": ({"structured_outputs": {"regex": "z{4}"}}, r"z{4}"),
}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/generate")


def body(route: str, fields: dict[str, Any], max_tokens: int = 60, **more: Any) -> dict[str, Any]:
    drawn = {"temperature": 0.8, "seed": 7, **more}
    if route == "/generate":
        drawn["sampling_seed"] = drawn.pop("seed")
        return {"text": "Go", "sampling_params": {"max_new_tokens": max_tokens, **drawn, **fields}}
    prompt = (
        {"prompt": "Go"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "Go"}]}
    )
    return {**prompt, "max_tokens": max_tokens, **drawn, **fields}


def text_of(route: str, answer: Any) -> str:
    if route == "/generate":
        return str(answer["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if route == "/v1/completions" else choice["message"]["content"])


@pytest.mark.parametrize("route", ROUTES)
def test_every_kind_on_every_route_is_kept_and_equal(
    cluster: Cluster, colocated: Colocated, route: str
) -> None:
    bodies = [body(route, fields) for fields, _ in KINDS.values()]
    both = [served.client.post_all(route, bodies) for served in (cluster, colocated)]
    for (_, pattern), (status, ours), (_, theirs) in zip(KINDS.values(), *both, strict=True):
        assert status == 200, ours
        assert re.fullmatch(pattern, text_of(route, ours)), (pattern, ours)
        assert text_of(route, ours) == text_of(route, theirs)


@pytest.mark.parametrize("route", ROUTES)
def test_a_json_object_is_an_object(cluster: Cluster, route: str) -> None:
    """As far as it got: a model without sense seldom comes to an end."""
    served = body(route, {"response_format": {"type": "json_object"}}, max_tokens=12, temperature=0)
    assert text_of(route, cluster.client.ok(route, served)).startswith("{")


def test_samples_each_follow_the_grammar_for_themselves_and_streams_do_too(cluster: Cluster) -> None:
    asked = body("/v1/completions", {"regex": "[a-z]{2,6}=[0-9]{1,3};"}, n=4, temperature=1.5)
    choices = cluster.client.ok("/v1/completions", asked)["choices"]
    texts = [choice["text"] for choice in choices]
    assert all(re.fullmatch("[a-z]{2,6}=[0-9]{1,3};", text) for text in texts), texts
    assert len(set(texts)) > 1
    streamed = dict.fromkeys(range(4), "")
    for event in cluster.client.events("/v1/completions", asked | {"stream": True}):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == texts


MALFORMED: dict[str, dict[str, Any]] = {
    "regex": {"regex": "(a"},
    "ebnf": {"ebnf": 'root ::= "a'},
    "structural_tag": {"structural_tag": {"type": "structural_tag"}},
    "guided_json": {"guided_json": {"type": "nonsense"}},
    "json_schema": {"json_schema": "{not json"},
    "guided_grammar": {"guided_grammar": "root ::= root"},
    "response_format.json_schema.schema": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/missing"}}}
    },
    "response_format.type": {"response_format": {"type": "xml"}},
    "guided_choice": {"guided_choice": ["a"], "regex": "b"},
}


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_malformed_is_refused_by_name_and_the_workers_go_on(
    cluster: Cluster, colocated: Colocated, route: str
) -> None:
    prefix = "sampling_params." if route == "/generate" else ""
    bodies = [body(route, fields) for fields in MALFORMED.values()]
    both = [served.client.post_all(route, bodies) for served in (cluster, colocated)]
    for name, ours, theirs in zip(MALFORMED, *both, strict=True):
        assert ours == theirs
        status, answer = ours
        refused = "regex" if name == "guided_choice" else name
        assert (status, answer["error"]["param"]) == (400, prefix + refused), answer
    for served in (cluster, colocated):
        served.client.ok(route, body(route, {}, max_tokens=2))


def test_what_cannot_be_compiled_or_followed_in_time_fails_alone(
    cluster: Cluster, colocated: Colocated
) -> None:
    route = "/v1/completions"
    hopeless = [
        {"guided_json": ENDLESS},
        {"guided_json": json.dumps(nested(900))},
        {"regex": "(" * 100_000 + "a" + ")" * 100_000},
    ]
    with ThreadPoolExecutor(2) as pool:
        for served in (cluster, colocated):
            bodies = [body(route, fields) for fields in hopeless]
            refused = pool.submit(served.client.post_all, route, bodies)
            started = time.monotonic()
            ordinary = served.client.ok(route, body(route, {"regex": "[a-b]{5}c"}))
            assert re.fullmatch("[a-b]{5}c", text_of(route, ordinary))
            waited = time.monotonic() - started
            assert not refused.done() or waited < 3, "an ordinary grammar waited for a hopeless one"
            for fields, (status, answer) in zip(hopeless, refused.result(), strict=True):
                assert (status, answer["error"]["param"]) == (400, next(iter(fields))), answer
        # As likely as not the sample ends before it gets too hard; what counts is that it ends.
        status, answer = cluster.client.post(route, body(route, {"ebnf": AMBIGUOUS}, max_tokens=200))
        assert status in (200, 400), answer


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_the_backend_in_use_is_in_the_readback(cluster: Cluster) -> None:
    for worker in cluster.workers:
        _, info = worker.client.get("/server_info")
        scheduler = info["processes"]["scheduler"] if "processes" in info else info["scheduler"]
        assert scheduler["bags"]["exec"]["grammar"]["grammar_backend"] == "xgrammar"
