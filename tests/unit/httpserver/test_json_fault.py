"""Half a character in JSON is called that, by whoever reads it."""

from __future__ import annotations

import pytest

from diptych.router.call import parse_fields
from diptych.router.errors import RouterError
from diptych.server.body import decode_json
from diptych.server.errors import BadRequest
from diptych.server.requests import ChatRequest

HALVES = {
    rb'{"messages": "\ud83d"}': r"\ud83d (byte 14)",
    rb'{"messages": "a\ud83d and so on, for longer"}': r"\ud83d (byte 15)",
    rb'{"messages": "\ud83d\ude00 \ude00"}': r"\ude00 (byte 27)",
    rb'{"messages": "\\\ud83d\ud83d\ude00"}': r"\ud83d (byte 16)",
    rb'{"messages": "\uD83D\u0041"}': r"\uD83D (byte 14)",
}


@pytest.mark.parametrize("body", HALVES)
def test_half_a_character_is_named_by_worker_and_router(body: bytes):
    with pytest.raises(BadRequest) as refused:
        decode_json(body, ChatRequest)
    with pytest.raises(RouterError) as passed_on:
        parse_fields(body)
    for error in (refused.value, passed_on.value):
        assert f"{HALVES[body]} is half a surrogate pair" in error.message


@pytest.mark.parametrize(
    "body", [rb'{"messages": "\ud83d\ude00"', rb'{"messages": "\\ud83d"', b'{"messages": "']
)
def test_other_broken_json_is_not_said_to_hold_half_a_character(body: bytes):
    with pytest.raises(BadRequest) as refused:
        decode_json(body, ChatRequest)
    assert "surrogate" not in refused.value.message
