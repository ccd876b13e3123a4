from __future__ import annotations

import json

import pytest

from diptych.server.body import decode_json
from diptych.server.errors import ApiError, BadRequest, engine_error
from diptych.server.requests import UNSUPPORTED, ChatRequest, CompletionRequest
from diptych.server.unsupported import refuse_unsupported

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"not json", None),
        (b'{"messages": "\xff\xfe"}', None),
        (b'{"a":' + b"[" * 100_000, None),
        (b'{"model": "m"}', "messages"),
        (b'{"messages": "Hi"}', "messages"),
        (b'{"messages": [{"content": "Hi"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "wizard", "content": "Hi"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "messages[0].content[0].type",
        ),
        (b'{"messages": [], "temperature": NaN}', None),
        (b'{"messages": [], "temperature": 1e999}', "temperature"),
        (b'{"messages": [], "max_tokens": "5"}', "max_tokens"),
        (b'{"messages": [], "max_tokens": true}', "max_tokens"),
        (b'{"messages": [], "max_tokens": 1.5}', "max_tokens"),
        (b'{"messages": [], "stop": [1]}', "stop[0]"),
        (b'{"messages": [], "logit_bias": {"x": 1}}', "logit_bias"),
        (b'{"messages": [], "stream_options": {"include_usage": "yes"}}', "stream_options.include_usage"),
        (b'{"messages": [], "bootstrap_room": "7"}', "bootstrap_room"),
    ],
)
def test_bad_bodies_are_refused_naming_the_field(body: bytes, param: str | None):
    with pytest.raises(BadRequest) as refused:
        decode_json(body, ChatRequest)
    assert refused.value.status == 400
    assert refused.value.param == param
    error = refused.value.body()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def test_nulls_extra_fields_and_both_key_kinds_are_accepted():
    body = {"messages": HI, "temperature": None, "user": "u", "metadata": {}, "logit_bias": {"15": -1}}
    assert decode_json(json.dumps(body).encode(), ChatRequest).logit_bias == {15: -1.0}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_is_refused_by_name(name: str):
    asks = {"prompt": "x", name: {"some": "thing"}}
    with pytest.raises(BadRequest) as refused:
        refuse_unsupported(json.dumps(asks).encode())
    assert refused.value.param == name
    asks_nothing = {"prompt": "x", name: None, "sampling_params": {name: UNSUPPORTED[name][-1]}}
    refuse_unsupported(json.dumps(asks_nothing).encode())


def test_unsupported_fields_inside_sampling_params_are_refused_too():
    with pytest.raises(BadRequest) as refused:
        refuse_unsupported(b'{"sampling_params": [{}, {"lora_path": "a"}]}')
    assert refused.value.param == "sampling_params.lora_path"


def test_suffix_is_refused_by_name():
    body = b'{"prompt": "x", "suffix": "y"}'
    decode_json(body, CompletionRequest)
    with pytest.raises(BadRequest, match="suffix"):
        refuse_unsupported(body)


@pytest.mark.parametrize(
    ("status", "expected"),
    [(400, 400), (409, 409), (429, 429), (503, 503), (504, 504), (500, 500), (200, 500)],
)
def test_engine_errors_keep_their_status_and_field(status: int, expected: int):
    error = engine_error("why", status=status, param="prompt" if status < 500 else None)
    assert isinstance(error, ApiError)
    assert (error.status, error.message) == (expected, "why")


def test_a_full_queue_is_told_as_openai_tells_a_rate_limit():
    error = engine_error("the queue is full", status=429, param=None)
    assert (error.type, error.code) == ("rate_limit_error", "rate_limit_exceeded")
    assert error.headers["Retry-After"] == "1"
