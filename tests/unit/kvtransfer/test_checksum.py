"""Decode asks for checksums; what arrives damaged fails on both legs, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from diptych.engine.wire import TokenLogprob
from diptych.kvtransfer import receiver_rooms, wire
from diptych.kvtransfer.checksum import PageChecksums, checksum_of_aux
from diptych.kvtransfer.control import ControlEndpoint
from diptych.kvtransfer.events import DestinationReady, Drained, Failed, HandshakeDone, Received, Sent
from diptych.kvtransfer.states import ReceiverState, SenderState

from .conftest import PAGE_BYTES, Pair, Side, aux, of

HASHED = "checksum_seconds_count"


def checking(pair: Pair) -> tuple[Side, Side]:
    """Prefill has it off, decode on."""
    prefill = pair.prefill()
    pair.settings = replace(pair.settings, checksum=True)
    return prefill, pair.decode()


def posted(pair: Pair, prefill: Side, decode: Side, room: int, first: int = 0) -> None:
    """Three pages, of which decode lacks those from `first` on, held back by the fabric."""
    pair.fabric.stalled = True
    prefill.manager.open(room)
    decode.manager.open(room, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(decode, HandshakeDone, room)))
    decode.manager.reserve(room, [20, 21, 2][first:], 12, first_page_index=first)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, room)))
    prefill.manager.send(room, [3, 4, 9], 0)


def land(pair: Pair) -> None:
    for write in list(pair.fabric.in_flight):
        pair.fabric.complete(write)
    pair.fabric.stalled = False


def passes(pair: Pair, prefill: Side, decode: Side, room: int) -> None:
    posted(pair, prefill, decode, room)
    land(pair)
    prefill.manager.finish(room, aux(room))
    pair.run_until(lambda: bool(of(decode, Received, room)) and bool(of(prefill, Sent, room)))
    assert (decode.slab[[20, 21, 2]] == prefill.slab[[3, 4, 9]]).all()


def fails_on_both(pair: Pair, prefill: Side, decode: Side, room: int) -> str:
    """The reason, after everything has drained and another room has passed."""
    pair.run_until(lambda: bool(of(decode, Drained, room)) and bool(of(prefill, Failed, room)))
    (at_decode,), (at_prefill,) = of(decode, Failed, room), of(prefill, Failed, room)
    assert isinstance(at_decode, Failed)
    assert isinstance(at_prefill, Failed)
    assert at_decode.reason == at_prefill.reason
    assert at_decode.status == at_prefill.status == 502
    assert not at_decode.drained
    assert not of(decode, Received, room)
    assert not of(prefill, Sent, room)
    assert decode.metric("failures_total", kind="checksum") == 1
    assert prefill.metric("failures_total", kind="peer") == 1
    assert decode.metric("quarantined_pages") == 0
    passes(pair, prefill, decode, room + 100)
    return at_decode.reason


def test_undamaged_room_passes_whatever_prefills_own_setting(pair: Pair) -> None:
    prefill, decode = checking(pair)
    passes(pair, prefill, decode, 1)
    assert prefill.metric(HASHED) > 0
    assert decode.metric(HASHED) > 0
    assert prefill.manager.state(1) is None


def test_nothing_is_hashed_for_a_decode_worker_that_does_not_ask(pair: Pair) -> None:
    pair.settings = replace(pair.settings, checksum=True)
    prefill = pair.prefill()
    pair.settings = replace(pair.settings, checksum=False)
    decode = pair.decode()
    passes(pair, prefill, decode, 1)
    assert prefill.metric(HASHED) == decode.metric(HASHED) == 0


def test_page_that_changed_on_the_way_fails_both_legs(pair: Pair) -> None:
    prefill, decode = checking(pair)
    posted(pair, prefill, decode, 1)
    land(pair)
    decode.slab[21, 5] ^= 1
    prefill.manager.finish(1, aux(1))
    assert "page 1 of the prompt's KV arrived damaged" in fails_on_both(pair, prefill, decode, 1)


def test_damage_is_found_by_the_page_s_place_in_the_prompt(pair: Pair) -> None:
    prefill, decode = checking(pair)
    posted(pair, prefill, decode, 1, first=2)
    land(pair)
    decode.slab[2, 0] ^= 128
    prefill.manager.finish(1, aux(1))
    assert "page 2 of the prompt's KV" in fails_on_both(pair, prefill, decode, 1)


def test_page_that_prefill_changed_after_posting_it_fails(pair: Pair) -> None:
    prefill, decode = checking(pair)
    posted(pair, prefill, decode, 1)
    prefill.slab[9, 63] ^= 1
    land(pair)
    prefill.manager.finish(1, aux(1))
    assert "page 2 of the prompt's KV" in fails_on_both(pair, prefill, decode, 1)


def tamper(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Every `Complete` that leaves is another one."""
    send = ControlEndpoint.send

    def changed(self: ControlEndpoint, target: str, body: wire.ControlMessage) -> None:
        if isinstance(body, wire.Complete) and body.room == 1:
            body = msgspec.structs.replace(body, **changes)
        send(self, target, body)

    monkeypatch.setattr(ControlEndpoint, "send", changed)


def test_changed_first_token_fails_both_legs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = checking(pair)
    tamper(monkeypatch, aux=msgspec.structs.replace(aux(1), first_token=8))
    posted(pair, prefill, decode, 1)
    land(pair)
    prefill.manager.finish(1, aux(1))
    assert "first token" in fails_on_both(pair, prefill, decode, 1)


@pytest.mark.parametrize("checksums", [None, wire.Checksums(pages=[b"x" * 8], aux=b"y" * 8)])
def test_missing_checksums_are_no_checksums(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, checksums: wire.Checksums | None
) -> None:
    prefill, decode = checking(pair)
    tamper(monkeypatch, checksums=checksums)
    posted(pair, prefill, decode, 1)
    land(pair)
    prefill.manager.finish(1, aux(1))
    assert "no checksums, or not one for each page" in fails_on_both(pair, prefill, decode, 1)


def test_pages_queued_before_the_destination_was_known_are_checked_too(pair: Pair) -> None:
    prefill, decode = checking(pair)
    prefill.manager.open(1)
    prefill.manager.send(1, [3, 4, 9], 0)
    prefill.manager.finish(1, aux(1))
    decode.manager.open(1, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(decode, HandshakeDone, 1)))
    decode.manager.reserve(1, [20, 21, 2], 12)
    pair.run_until(lambda: bool(of(decode, Received, 1)) and bool(of(prefill, Sent, 1)))
    assert prefill.metric(HASHED) == 1


def comparing_slowly(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> tuple[Side, Side]:
    """Room 1 while decode has compared one of its three pages."""
    monkeypatch.setattr(receiver_rooms, "_VERIFY_BYTES", PAGE_BYTES)
    prefill, decode = checking(pair)
    posted(pair, prefill, decode, 1)
    land(pair)
    prefill.manager.finish(1, aux(1))
    pair.run_until(lambda: decode.manager.state(1) is ReceiverState.VERIFYING)
    return prefill, decode


def test_a_long_prompt_is_compared_in_pieces_between_which_the_loop_turns(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = comparing_slowly(pair, monkeypatch)
    assert prefill.manager.state(1) is SenderState.CONFIRMING
    for _ in range(2):
        assert decode.manager.busy
        assert decode.manager.next_deadline() == 0
        assert not of(decode, Received, 1)
        decode.events += decode.manager.step()
    assert of(decode, Received, 1)
    pair.run_until(lambda: bool(of(prefill, Sent, 1)))
    assert decode.metric(HASHED) == 3
    assert not decode.manager.busy


def test_abort_while_comparing_gives_the_pages_back_once_prefill_knows(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = comparing_slowly(pair, monkeypatch)
    decode.manager.abort(1, "the client left")
    pair.run_until(lambda: bool(of(decode, Drained, 1)) and bool(of(prefill, Failed, 1)))
    assert of(decode, Failed, 1) == [Failed(1, "the client left", 499, drained=False)]
    assert of(prefill, Failed, 1) == [Failed(1, "the client left", 499, drained=True)]
    passes(pair, prefill, decode, 2)


def test_prefill_waits_for_the_verdict_no_longer_than_its_deadline(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = ControlEndpoint.send

    def without_verdict(self: ControlEndpoint, target: str, body: wire.ControlMessage) -> None:
        if not isinstance(body, wire.Verified):
            send(self, target, body)

    monkeypatch.setattr(ControlEndpoint, "send", without_verdict)
    pair.settings = replace(pair.settings, transfer_timeout=0.3)
    prefill, decode = checking(pair)
    posted(pair, prefill, decode, 1)
    land(pair)
    prefill.manager.finish(1, aux(1))
    pair.run_until(lambda: bool(of(prefill, Failed, 1)), timeout=2)
    assert "did not confirm" in of(prefill, Failed, 1)[0].reason
    assert prefill.metric("deadline_hits_total", state="confirming") == 1
    assert of(decode, Received, 1)


def test_checksum_of_the_aux_block_survives_the_wire() -> None:
    """Whatever number types prefill has put in: only what arrives counts."""
    sent = msgspec.structs.replace(
        aux(1),
        first_logprob=TokenLogprob(7, 0, [(7, 0), (8, -1.5)]),
        prompt_logprobs=[None, TokenLogprob(3, -0.1)],
    )
    complete = wire.Complete(room=1, lease=1, num_pages=0, aux=sent)
    arrived = wire.decode(wire.encode("a", "b", complete)).body
    assert isinstance(arrived, wire.Complete)
    assert checksum_of_aux(arrived.aux) == checksum_of_aux(sent)
    other = msgspec.structs.replace(sent, cached_tokens=5)
    assert checksum_of_aux(other) != checksum_of_aux(sent)


def test_checksum_of_a_page_covers_every_byte_of_it_and_no_other() -> None:
    slab = torch.zeros(4, 8, dtype=torch.bfloat16)
    checksums = PageChecksums(slab, page_bytes=16)
    before = checksums.of([0, 1, 2, 3])
    assert len(set(before)) == 1
    for column in range(8):
        slab[2].zero_()
        slab[2, column] = 1
        after = checksums.of([3, 2, 1])
        assert after[0] == after[2] == before[0]
        assert after[1] != before[0]
