"""Control messages survive the wire; anything else is named and refused."""

from __future__ import annotations

import msgspec
import pytest

from diptych.engine.wire import TokenLogprob
from diptych.kvtransfer import wire
from diptych.kvtransfer.backends.interface import Endpoint
from diptych.kvtransfer.identity import Identity

from .conftest import make_fingerprint

ENDPOINT = Endpoint(
    backend="fake", agent="a", metadata=b"\x00\xff", base_address=1 << 46, page_bytes=64, num_pages=4
)
AUX = wire.AuxBlock(
    room=2**63 - 1,
    prompt_tokens=3,
    first_token=5,
    first_logprob=TokenLogprob(5, -0.5, [(5, -0.5), (6, -1.0)]),
    prompt_logprobs=[None, TokenLogprob(1, -2.0), TokenLogprob(2, -3.0)],
)
MESSAGES: list[wire.ControlMessage] = [
    wire.Hello(
        number=1,
        identity=Identity.current(),
        control_address="tcp://h:1",
        fingerprint=make_fingerprint(),
        endpoint=ENDPOINT,
    ),
    wire.Welcome(hello=1),
    wire.Refused(reason="no", instance_id="i"),
    wire.Reserve(room=2**63 - 1, lease=1, pages=[3, 1], num_prompt_tokens=5, first_page_index=2),
    wire.Complete(room=1, lease=2, num_pages=2, aux=AUX),
    wire.Abort(room=1, lease=2, reason="ü", status=499),
    wire.RoomDrained(room=1, lease=2, clean=False),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_message_arrives_as_it_was_sent(message: wire.ControlMessage) -> None:
    envelope = wire.decode(wire.encode("a", "b", message))
    assert envelope == wire.Envelope(source="a", target="b", body=message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_truncation_is_refused(message: wire.ControlMessage) -> None:
    preamble, payload = wire.encode("a", "b", message)
    for length in range(len(payload)):
        with pytest.raises(wire.WireError):
            wire.decode([preamble, payload[:length]])


@pytest.mark.parametrize("position", range(0, 120, 7))
def test_a_flipped_byte_gives_a_message_or_a_wire_error(position: int) -> None:
    for message in MESSAGES:
        preamble, payload = wire.encode("a", "b", message)
        corrupt = bytearray(payload)
        corrupt[position % len(corrupt)] ^= 0x55
        try:
            assert isinstance(wire.decode([preamble, bytes(corrupt)]), wire.Envelope)
        except wire.WireError:
            continue


def test_another_version_is_named_with_both_numbers_before_anything_is_decoded() -> None:
    with pytest.raises(wire.VersionMismatch, match="version 9 at the peer, version 2 here"):
        wire.decode([b"DPTC\x09", b"whatever that version means"])


def test_oversized_message_is_refused_on_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = wire.encode("a", "b", MESSAGES[0])
    monkeypatch.setattr(wire, "MAX_CONTROL_BYTES", 50)
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.encode("a", "b", MESSAGES[0])
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.decode(frames)


def test_status_outside_4xx_and_5xx_is_refused() -> None:
    abort = wire.Abort(room=1, lease=1, reason="r", status=200)
    with pytest.raises(wire.WireError):
        wire.decode(wire.encode("a", "b", abort))


def test_unknown_tag_is_refused() -> None:
    payload = msgspec.msgpack.encode({"source": "a", "target": "b", "body": {"type": "exec", "code": "1"}})
    with pytest.raises(wire.WireError):
        wire.decode([b"DPTC\x02", payload])
