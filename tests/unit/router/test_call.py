"""A request body: what is kept, and what the bootstrap fields become."""

from __future__ import annotations

import json

import pytest

from diptych.router.call import Call, parse_fields
from diptych.router.errors import RouterError


def body(raw, port=1):
    return Call("/generate", parse_fields(raw), {}, "r").body("h", port, 2**63 - 1)


def test_every_field_survives_digit_for_digit():
    raw = b'{"a": 123456789012345678901234567890, "b": 0.10000000000000000001, "c": {"d": ["\\u00e9", null]}}'
    out = body(raw).decode()
    assert "123456789012345678901234567890" in out
    assert "0.10000000000000000001" in out
    assert json.loads(out)["c"] == {"d": ["é", None]}


def test_bootstrap_fields_replace_what_the_client_sent():
    out = body(b'{"bootstrap_room": [1, 2], "bootstrap_host": "evil", "bootstrap_port": 1}', port=None)
    assert json.loads(out) == {"bootstrap_host": "h", "bootstrap_port": None, "bootstrap_room": 2**63 - 1}
    assert out.count(b"bootstrap_room") == 1


@pytest.mark.parametrize(
    "raw", [b"", b" ", b"{", b"{}x", b"[]", b"3", b"null", b'{"a":tru}', b'{"a":"\xff"}']
)
def test_anything_but_a_json_object_is_a_400(raw):
    with pytest.raises(RouterError) as raised:
        parse_fields(raw)
    assert raised.value.status == 400
