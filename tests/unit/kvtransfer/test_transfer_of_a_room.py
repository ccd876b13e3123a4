"""The way of a room through both sides when nothing fails, and who is refused."""

from __future__ import annotations

import pytest

from diptych.kvtransfer.errors import DuplicateRoom, TransferError, UnknownRoom
from diptych.kvtransfer.events import DestinationReady, Failed, HandshakeDone, Received, Sent
from diptych.kvtransfer.states import SenderState

from .conftest import Pair, Side, aux, make_fingerprint, of


def shake(pair: Pair, decode: Side, room: int) -> None:
    decode.manager.open(room, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(decode, HandshakeDone, room)))


def transfer(pair: Pair, prefill: Side, decode: Side, room: int, src: list[int], dst: list[int]) -> None:
    prefill.manager.open(room)
    shake(pair, decode, room)
    decode.manager.reserve(room, dst, 12)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, room)))
    prefill.manager.send(room, src, 0)
    prefill.manager.finish(room, aux(room))
    pair.run_until(lambda: bool(of(decode, Received, room)) and bool(of(prefill, Sent, room)))


def test_pages_and_aux_arrive_and_both_sessions_end(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    transfer(pair, prefill, decode, 5, [3, 4, 9], [20, 21, 2])
    assert (decode.slab[[20, 21, 2]] == prefill.slab[[3, 4, 9]]).all()
    assert of(decode, Received, 5)[0].aux == aux(5)
    assert of(prefill, DestinationReady, 5) == [DestinationReady(5, 3, 12)]
    assert prefill.manager.state(5) is None
    assert decode.manager.state(5) is None
    assert prefill.metric("pages_total") == 3
    assert prefill.metric("bytes_total") == 3 * 64
    assert prefill.metric("descriptors_total") == 2
    assert decode.metric("pages_received_total") == 3


def test_chunks_land_at_their_index(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(1)
    shake(pair, decode, 1)
    decode.manager.reserve(1, [10, 11, 12], 12)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 1)))
    prefill.manager.send(1, [0, 1], 0)
    pair.run_until(lambda: not prefill.manager.busy)
    assert not of(decode, Received, 1)
    prefill.manager.send(1, [2], 2)
    prefill.manager.finish(1, aux(1))
    pair.run_until(lambda: bool(of(decode, Received, 1)))
    assert (decode.slab[10:13] == prefill.slab[0:3]).all()


def test_pages_sent_before_the_destination_is_known_leave_once_it_is(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(1)
    prefill.manager.send(1, [0, 1, 2], 0)
    prefill.manager.finish(1, aux(1))
    shake(pair, decode, 1)
    decode.manager.reserve(1, [10, 11, 12], 12)
    pair.run_until(lambda: bool(of(decode, Received, 1)))
    assert (decode.slab[10:13] == prefill.slab[0:3]).all()


def test_reservation_that_comes_before_the_request_is_kept(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    shake(pair, decode, 1)
    decode.manager.reserve(1, [10, 11, 12], 12)
    pair.run_for(0.2)
    prefill.manager.open(1)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 1)))


def test_only_the_pages_decode_lacks_are_written(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    before = decode.slab.clone()
    prefill.manager.open(1)
    shake(pair, decode, 1)
    decode.manager.reserve(1, [30], 12, first_page_index=2)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 1)))
    prefill.manager.send(1, [0, 1], 0)
    prefill.manager.send(1, [2], 2)
    prefill.manager.finish(1, aux(1))
    pair.run_until(lambda: bool(of(decode, Received, 1)))
    assert (decode.slab[30] == prefill.slab[2]).all()
    assert (decode.slab[:30] == before[:30]).all()
    assert prefill.metric("pages_total") == 1


def test_ended_room_may_be_used_again_without_another_handshake(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    transfer(pair, prefill, decode, 5, [0, 1, 2], [0, 1, 2])
    prefill.events.clear()
    decode.events.clear()
    transfer(pair, prefill, decode, 5, [3, 4, 5], [6, 7, 8])
    assert (decode.slab[6:9] == prefill.slab[3:6]).all()
    assert prefill.metric("handshakes_total", outcome="accepted") == 1


def test_duplicate_room_is_refused_and_the_first_goes_on(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(5)
    with pytest.raises(DuplicateRoom):
        prefill.manager.open(5)
    shake(pair, decode, 5)
    with pytest.raises(DuplicateRoom):
        decode.manager.open(5, "127.0.0.1", pair.service.port)
    decode.manager.reserve(5, [1, 2, 3], 12)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 5)))
    prefill.manager.send(5, [4, 5, 6], 0)
    prefill.manager.finish(5, aux(5))
    pair.run_until(lambda: bool(of(decode, Received, 5)))


def test_second_decode_worker_cannot_take_over_a_room(pair: Pair) -> None:
    prefill, first, second = pair.prefill(), pair.decode(), pair.decode()
    prefill.manager.open(5)
    for decode in (first, second):
        shake(pair, decode, 5)
    first.manager.reserve(5, [1, 2, 3], 12)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 5)))
    second.manager.reserve(5, [1, 2, 3], 12)
    pair.run_until(lambda: second.manager.state(5) is None)
    assert "already has a destination" in of(second, Failed, 5)[0].reason
    prefill.manager.send(5, [4, 5, 6], 0)
    prefill.manager.finish(5, aux(5))
    pair.run_until(lambda: bool(of(first, Received, 5)))


def test_pages_beyond_the_reservation_are_refused_before_any_write(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(1)
    shake(pair, decode, 1)
    decode.manager.reserve(1, [10, 11], 8)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 1)))
    with pytest.raises(TransferError, match="beyond the last page decode reserved"):
        prefill.manager.send(1, [0, 1], 1)
    assert prefill.metric("writes_total") == 0
    assert prefill.manager.state(1) is SenderState.READY


@pytest.mark.parametrize("pages", [[0, 1, 99], [0, -1, 2], [3, 3, 4]])
def test_reservation_of_impossible_pages_fails_that_room_only(pair: Pair, pages: list[int]) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(1)
    shake(pair, decode, 1)
    decode.manager.reserve(1, pages, 12)
    pair.run_until(lambda: decode.manager.state(1) is None)
    assert "reservation refused" in of(decode, Failed, 1)[0].reason
    assert of(decode, Failed, 1)[0].status == 400
    transfer(pair, prefill, decode, 2, [0, 1, 2], [0, 1, 2])


def test_sending_for_an_unknown_room_raises(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    with pytest.raises(UnknownRoom):
        prefill.manager.send(9, [0], 0)
    with pytest.raises(UnknownRoom):
        decode.manager.reserve(9, [0], 1)


def test_mismatch_fails_both_legs_with_the_same_sentence(pair: Pair) -> None:
    prefill = pair.prefill()
    decode = pair.decode(fingerprint=make_fingerprint(page_size=8, dtype="bfloat16"))
    prefill.manager.open(3)
    decode.manager.open(3, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(prefill, Failed, 3)) and bool(of(decode, Failed, 3)), timeout=2)
    reason = of(decode, Failed, 3)[0].reason
    assert of(prefill, Failed, 3)[0].reason == reason
    assert "page_size: 8 at decode, 4 at prefill" in reason
    assert "dtype: bfloat16 at decode, float32 at prefill" in reason
    # Both go on with a worker that fits.
    transfer(pair, prefill, pair.decode(), 4, [0, 1, 2], [0, 1, 2])


def test_mismatch_is_known_when_the_request_comes_later(pair: Pair) -> None:
    prefill = pair.prefill()
    decode = pair.decode(fingerprint=make_fingerprint(page_size=8))
    decode.manager.open(3, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(decode, Failed, 3)))
    pair.run_for(0.3)
    prefill.manager.open(3)
    pair.run_until(lambda: bool(of(prefill, Failed, 3)), timeout=1)


def test_fewer_pages_than_the_prompt_needs_fail_the_receiver(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(1)
    shake(pair, decode, 1)
    decode.manager.reserve(1, [10, 11, 12], 12)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 1)))
    prefill.manager.send(1, [0, 1], 0)
    prefill.manager.finish(1, aux(1))
    pair.run_until(lambda: decode.manager.state(1) is None)
    assert "prefill wrote 2 of 3 pages" in of(decode, Failed, 1)[0].reason


def test_different_prompt_lengths_fail_the_receiver(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(1)
    shake(pair, decode, 1)
    decode.manager.reserve(1, [10, 11, 12], 12)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 1)))
    prefill.manager.send(1, [0, 1, 2], 0)
    prefill.manager.finish(1, aux(1, prompt_tokens=11))
    pair.run_until(lambda: decode.manager.state(1) is None)
    assert "prompt tokens: 11 at prefill, 12 at decode" in of(decode, Failed, 1)[0].reason


def test_idle_pair_asks_for_no_wake_up(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    transfer(pair, prefill, decode, 5, [0, 1, 2], [0, 1, 2])
    pair.run_for(0.1)
    for side in (prefill, decode):
        assert side.manager.next_deadline() is None
        assert not side.manager.busy
