"""Who fails tells the other at once, and pages come back only when no write can touch them."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import zmq

from diptych.kvtransfer.errors import DuplicateRoom, UnknownRoom
from diptych.kvtransfer.events import DestinationReady, Drained, Failed, HandshakeDone, Received
from diptych.kvtransfer.states import ReceiverState, SenderState

from .conftest import Pair, Side, aux, of


def shake(pair: Pair, decode: Side, room: int) -> None:
    decode.manager.open(room, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(decode, HandshakeDone, room)))


def in_flight(pair: Pair, prefill: Side, decode: Side, room: int = 1) -> None:
    """A room whose two pages are posted and held back by the fabric."""
    pair.fabric.stalled = True
    prefill.manager.open(room)
    shake(pair, decode, room)
    decode.manager.reserve(room, [10, 11], 8)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, room)))
    prefill.manager.send(room, [0, 1], 0)


def complete_all(pair: Pair) -> None:
    for write in list(pair.fabric.in_flight):
        pair.fabric.complete(write)


def passes_a_room(pair: Pair, prefill: Side, decode: Side, room: int) -> None:
    pair.fabric.stalled = False
    prefill.events.clear()
    decode.events.clear()
    prefill.manager.open(room)
    shake(pair, decode, room)
    decode.manager.reserve(room, [0, 1, 2], 12)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, room)))
    prefill.manager.send(room, [7, 8, 9], 0)
    prefill.manager.finish(room, aux(room))
    pair.run_until(lambda: bool(of(decode, Received, room)))
    assert (decode.slab[0:3] == prefill.slab[7:10]).all()


def test_abort_at_decode_while_writes_are_in_flight_quarantines_until_they_are_final(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    in_flight(pair, prefill, decode)
    decode.manager.abort(1, "the client left")
    pair.run_until(lambda: bool(of(prefill, Failed, 1)) and bool(of(decode, Failed, 1)), timeout=1)
    assert of(decode, Failed, 1) == [Failed(1, "the client left", 499, drained=False)]
    assert of(prefill, Failed, 1) == [Failed(1, "the client left", 499, drained=False)]
    assert decode.manager.state(1) is ReceiverState.DRAINING
    assert prefill.manager.state(1) is SenderState.DRAINING
    assert decode.metric("quarantined_pages") == 2
    with pytest.raises(DuplicateRoom):
        decode.manager.open(1, "127.0.0.1", pair.service.port)
    with pytest.raises(UnknownRoom):
        prefill.manager.send(1, [2], 0)
    pair.run_for(1.0)  # asks again meanwhile, and probes: neither is proof
    assert not of(decode, Drained, 1)
    complete_all(pair)
    pair.run_until(lambda: bool(of(decode, Drained, 1)) and bool(of(prefill, Drained, 1)), timeout=1)
    assert decode.metric("quarantined_pages") == 0
    assert len(of(decode, Failed, 1)) == len(of(prefill, Failed, 1)) == 1
    passes_a_room(pair, prefill, decode, 1)


def test_abort_at_prefill_while_writes_are_in_flight(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    in_flight(pair, prefill, decode)
    prefill.manager.abort(1, "cancelled at prefill")
    pair.run_until(lambda: bool(of(decode, Failed, 1)), timeout=1)
    assert of(decode, Failed, 1) == [Failed(1, "cancelled at prefill", 499, drained=False)]
    assert not of(decode, Drained, 1)
    complete_all(pair)
    pair.run_until(lambda: bool(of(decode, Drained, 1)) and bool(of(prefill, Drained, 1)), timeout=1)


def test_abort_at_prefill_before_any_write_frees_both_at_once(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(1)
    shake(pair, decode, 1)
    decode.manager.reserve(1, [1], 4)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 1)))
    prefill.manager.abort(1, "too long", 400)
    pair.run_until(lambda: bool(of(decode, Drained, 1)), timeout=1)
    assert of(prefill, Failed, 1) == [Failed(1, "too long", 400, drained=True)]
    assert of(decode, Failed, 1)[0].status == 400


def test_abort_at_prefill_before_the_reservation_fails_decode_when_it_reserves(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(1)
    prefill.manager.abort(1, "the prompt is too long", 400)
    shake(pair, decode, 1)
    decode.manager.reserve(1, [1], 4)
    pair.run_until(lambda: bool(of(decode, Drained, 1)), timeout=1)
    assert of(decode, Failed, 1)[0].reason == "the prompt is too long"


def test_abort_at_decode_before_the_request_fails_it_when_it_comes(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    shake(pair, decode, 1)
    decode.manager.reserve(1, [1], 4)
    decode.manager.abort(1, "the client left")
    pair.run_until(lambda: bool(of(decode, Drained, 1)), timeout=1)
    prefill.manager.open(1)
    pair.run_until(lambda: bool(of(prefill, Failed, 1)), timeout=1)
    assert of(prefill, Failed, 1)[0].reason == "the client left"
    passes_a_room(pair, prefill, decode, 1)


def test_abort_at_decode_before_it_reserved_fails_prefill_at_once(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(1)
    shake(pair, decode, 1)
    decode.manager.abort(1, "no pages left", 503)
    pair.run_until(lambda: bool(of(prefill, Failed, 1)), timeout=1)
    assert of(decode, Failed, 1) == [Failed(1, "no pages left", 503, drained=True)]
    passes_a_room(pair, prefill, decode, 1)


def test_failed_write_fails_the_room_and_the_next_request_connects_afresh(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    in_flight(pair, prefill, decode)
    for write in list(pair.fabric.in_flight):
        pair.fabric.fail(write, "cable cut")
    pair.run_until(lambda: bool(of(decode, Drained, 1)), timeout=2)
    assert "cable cut" in of(prefill, Failed, 1)[0].reason
    assert "cable cut" in of(decode, Failed, 1)[0].reason
    passes_a_room(pair, prefill, decode, 2)
    assert prefill.metric("handshakes_total", outcome="accepted") == 2


def test_prefill_waits_for_a_destination_no_longer_than_its_deadline(pair: Pair) -> None:
    pair.settings = replace(pair.settings, bootstrap_timeout=0.3)
    prefill = pair.prefill()
    prefill.manager.open(1)
    pair.run_until(lambda: bool(of(prefill, Failed, 1)), timeout=1)
    failed = of(prefill, Failed, 1)[0]
    assert "0.3 s" in failed.reason
    assert "awaiting destination" in failed.reason
    assert failed.status == 504
    assert prefill.metric("deadline_hits_total", state="awaiting destination") == 1


def test_reservation_whose_request_never_comes_is_given_back(pair: Pair) -> None:
    pair.settings = replace(pair.settings, bootstrap_timeout=0.3)
    prefill, decode = pair.prefill(), pair.decode()
    shake(pair, decode, 1)
    decode.manager.reserve(1, [1], 4)
    pair.run_until(lambda: bool(of(decode, Drained, 1)), timeout=1)
    assert "got no request" in of(decode, Failed, 1)[0].reason
    pair.run_until(lambda: prefill.manager.next_deadline() is None)


def test_decode_waits_for_pages_no_longer_than_its_deadline(pair: Pair) -> None:
    pair.settings = replace(pair.settings, receive_timeout=0.3)
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(1)
    shake(pair, decode, 1)
    decode.manager.reserve(1, [1], 4)
    pair.run_until(lambda: bool(of(prefill, Failed, 1)), timeout=1)
    assert "within 0.3 s (state: receiving)" in of(decode, Failed, 1)[0].reason
    assert of(prefill, Failed, 1)[0].reason == of(decode, Failed, 1)[0].reason


def test_stalled_writes_fail_at_their_deadline_and_drain_when_they_end(pair: Pair) -> None:
    pair.settings = replace(pair.settings, transfer_timeout=0.3)
    prefill, decode = pair.prefill(), pair.decode()
    in_flight(pair, prefill, decode)
    prefill.manager.finish(1, aux(1, prompt_tokens=8))
    pair.run_until(lambda: bool(of(decode, Failed, 1)), timeout=1)
    assert "still in flight after 0.3 s (state: finishing)" in of(decode, Failed, 1)[0].reason
    assert not of(decode, Drained, 1)
    complete_all(pair)
    pair.run_until(lambda: bool(of(decode, Drained, 1)) and bool(of(prefill, Drained, 1)), timeout=1)


def test_unreachable_bootstrap_service_fails_the_room_at_once(pair: Pair) -> None:
    decode = pair.decode()
    decode.manager.open(1, "127.0.0.1", 1)
    pair.run_until(lambda: bool(of(decode, Failed, 1)), timeout=1)
    assert "127.0.0.1:1 can't be reached" in of(decode, Failed, 1)[0].reason


def test_nonsense_bootstrap_host_fails_the_room(pair: Pair) -> None:
    decode = pair.decode()
    decode.manager.open(1, "not a host\r\nX: y", 80)
    decode.manager.open(2, "x" * 5000, 80)
    decode.manager.open(3, "127.0.0.1", 99999999)
    pair.run_until(lambda: all(of(decode, Failed, room) for room in (1, 2, 3)), timeout=4)


def test_request_for_a_prefill_that_still_loads_waits_for_it(pair: Pair) -> None:
    prefill, decode = pair.prefill(registered=False), pair.decode()
    decode.manager.open(1, "127.0.0.1", pair.service.port)
    pair.run_for(0.3)
    assert decode.manager.state(1) is ReceiverState.HANDSHAKING
    pair.register(prefill)
    pair.run_until(lambda: bool(of(decode, HandshakeDone, 1)), timeout=2)


def test_prefill_that_never_loads_fails_at_the_handshake_deadline(pair: Pair) -> None:
    pair.settings = replace(pair.settings, handshake_timeout=0.5)
    decode = pair.decode()
    decode.manager.open(1, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(decode, Failed, 1)), timeout=2)
    assert "within 0.5 s (state: handshaking)" in of(decode, Failed, 1)[0].reason
    pair.run_for(0.6)
    assert decode.manager.next_deadline() is None


def test_vanished_prefill_fails_its_rooms_only_and_its_successor_serves(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(1)
    shake(pair, decode, 1)
    decode.manager.reserve(1, [1], 4)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 1)))
    pair.drop(prefill)
    pair.run_until(lambda: bool(of(decode, Failed, 1)), timeout=1)
    pair.run_until(lambda: bool(of(decode, Drained, 1)), timeout=3)
    port = int(prefill.manager.control_address.rpartition(":")[2])
    passes_a_room(pair, pair.prefill(port=port), decode, 1)


def test_vanished_decode_fails_its_rooms_at_prefill_only(pair: Pair) -> None:
    prefill, first, second = pair.prefill(), pair.decode(), pair.decode()
    for room, decode in ((1, first), (2, second)):
        prefill.manager.open(room)
        shake(pair, decode, room)
        decode.manager.reserve(room, [1], 4)
    pair.run_until(lambda: all(of(prefill, DestinationReady, room) for room in (1, 2)))
    pair.drop(first)
    pair.run_until(lambda: bool(of(prefill, Failed, 1)), timeout=1)
    prefill.manager.send(2, [5], 0)
    prefill.manager.finish(2, aux(2, prompt_tokens=4))
    pair.run_until(lambda: bool(of(second, Received, 2)))


@pytest.mark.parametrize(
    "frames",
    [
        [b"garbage"],
        [b"DPTC\x02", b"\xff\x00garbage"],
        [b"DPTC\x02", b""],
        [b"DPTC\x63", b"\x80"],
        [b"DPTC\x02", b"\x81" * 2000],
        [b"", b"", b"", b""],
    ],
    ids=["one frame", "no msgpack", "empty", "version", "nested", "frames"],
)
def test_garbage_on_the_control_port_is_counted_and_changes_nothing(pair: Pair, frames: list[bytes]) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(prefill.manager.control_address)
    stranger.send_multipart(frames)
    dropped = "version" if frames[0] == b"DPTC\x63" else "malformed"
    pair.run_until(lambda: prefill.metric("control_dropped_total", reason=dropped) == 1)
    passes_a_room(pair, prefill, decode, 1)
    stranger.close()
    context.term()


def test_message_for_an_earlier_process_is_answered_not_acted_on(pair: Pair) -> None:
    """What a peer had queued for a worker that died must not reach the one that took its address."""
    from diptych.kvtransfer import wire

    prefill = pair.prefill()
    prefill.manager.open(1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(prefill.manager.control_address)
    abort = wire.Abort(room=1, lease=1, reason="no", status=500)
    stranger.send_multipart(wire.encode("someone", "the process before", abort))
    pair.run_for(0.3)
    assert stranger.poll(2000)
    answer = wire.decode(stranger.recv_multipart()).body
    assert isinstance(answer, wire.Refused)
    assert answer.instance_id == prefill.identity.instance_id
    assert prefill.manager.state(1) is SenderState.AWAITING_DESTINATION
    stranger.close()
    context.term()


def test_failure_reaches_the_other_side_without_waiting_for_a_timer(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    in_flight(pair, prefill, decode)
    started = time.monotonic()
    prefill.manager.abort(1, "stop")
    pair.run_until(lambda: bool(of(decode, Failed, 1)), timeout=1)
    assert time.monotonic() - started < 0.15
