"""Prefill's own bound on a room whose pages are reserved, should decode fall silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.kvtransfer.events import DestinationReady, Failed, HandshakeDone
from diptych.kvtransfer.receiver import DecodeReceiver
from diptych.kvtransfer.sender import PrefillSender
from diptych.kvtransfer.states import SenderState

from .conftest import Pair, of


@pytest.mark.parametrize("state", [SenderState.READY, SenderState.SENDING])
def test_a_reserved_room_with_nothing_in_flight_ends_by_prefills_own_deadline(
    pair: Pair, state: SenderState
) -> None:
    pair.settings = replace(pair.settings, receive_timeout=0.3, heartbeat_interval=0.2)
    prefill, decode = pair.prefill(), pair.decode()
    sender, receiver = prefill.manager, decode.manager
    assert isinstance(sender, PrefillSender)
    assert isinstance(receiver, DecodeReceiver)
    sender.open(1, 8)
    receiver.open(1, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(decode, HandshakeDone, 1)))
    receiver.reserve(1, [4, 5], 8)
    # Its connection stays, and its scheduler takes no turn any more.
    pair.sides.remove(decode)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 1)))
    if state is SenderState.SENDING:
        sender.send(1, [0], 0)
        pair.run_for(0.05)
    assert sender.state(1) is state
    pair.run_until(lambda: bool(of(prefill, Failed, 1)))
    (failed,) = of(prefill, Failed, 1)
    assert isinstance(failed, Failed)
    assert (failed.status, failed.drained) == (504, True)
    assert f"not delivered within 0.3 s of being reserved (state: {state.value})" in failed.reason
    pair.sides.append(decode)


@pytest.mark.parametrize(
    ("tokens", "pages"), [(9, [4, 5]), (8, [4]), (8, [4, 5, 6])], ids=["prompt", "too few", "too many"]
)
def test_a_reservation_for_another_prompt_is_refused_before_any_write(
    pair: Pair, tokens: int, pages: list[int]
) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    sender, receiver = prefill.manager, decode.manager
    assert isinstance(sender, PrefillSender)
    assert isinstance(receiver, DecodeReceiver)
    sender.open(1, 8)
    sender.send(1, [0, 1], 0)
    receiver.open(1, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(decode, HandshakeDone, 1)))
    receiver.reserve(1, pages, tokens)
    pair.run_until(lambda: bool(of(prefill, Failed, 1) and of(decode, Failed, 1)))
    (here,), (there,) = of(prefill, Failed, 1), of(decode, Failed, 1)
    assert isinstance(here, Failed)
    assert isinstance(there, Failed)
    assert (here.status, here.reason) == (there.status, there.reason)
    assert here.status == 400
    assert not of(prefill, DestinationReady, 1)
    assert prefill.metric("pages_total") == 0


def test_what_was_sent_without_a_destination_can_be_taken_back(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    sender, receiver = prefill.manager, decode.manager
    assert isinstance(sender, PrefillSender)
    assert isinstance(receiver, DecodeReceiver)
    sender.open(1, 8)
    sender.send(1, [0, 1], 0)
    sender.recall(1)
    receiver.open(1, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(decode, HandshakeDone, 1)))
    receiver.reserve(1, [4, 5], 8)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 1)))
    assert sender.state(1) is SenderState.READY
    assert pair.fabric.in_flight == []
