"""Injected faults are what they say, and both sides come through them: every page accounted for, the next
room delivered whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from diptych.engine.faults import FaultChange, FaultRule, Where
from diptych.kvtransfer import wire
from diptych.kvtransfer.events import DestinationReady, Drained, Failed, HandshakeDone, Received, Sent
from diptych.kvtransfer.faults.corruption import corrupt
from diptych.kvtransfer.faults.injector import Injector
from diptych.kvtransfer.faults.parts import faulty_parts
from diptych.kvtransfer.parts import TransferParts
from diptych.kvtransfer.states import ReceiverState, SenderState
from diptych.kvtransfer.stats import TransferStats
from diptych.launch.errors import StartupError
from diptych.launch.faults import parse_rules

from .conftest import Pair, aux, of


class FaultyPair(Pair):
    """One prefill and one decode side, each with an injector."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = replace(self.settings, bootstrap_timeout=1, receive_timeout=1)
        self.injectors: list[Injector] = []
        self.around = self._faulty
        self.prefill_side, self.decode_side = self.prefill(), self.decode()
        self.prefill_faults, self.decode_faults = self.injectors

    def _faulty(self, parts: TransferParts) -> TransferParts:
        self.injectors.append(Injector(parts.stats))
        return faulty_parts(parts, self.injectors[-1])

    def start(self, room: int) -> None:
        """Both legs of a request arrive."""
        self.prefill_side.manager.open(room)
        self.decode_side.manager.open(room, "127.0.0.1", self.service.port)

    def reserve(self, room: int) -> None:
        self.run_until(lambda: bool(of(self.decode_side, HandshakeDone, room)))
        self.decode_side.manager.reserve(room, [10, 11, 12], 12)

    def send(self, room: int) -> None:
        """Prefill computes, in two chunks."""
        self.run_until(lambda: bool(of(self.prefill_side, DestinationReady, room)))
        self.prefill_side.manager.send(room, [0, 1], 0)
        self.prefill_side.manager.send(room, [2], 2)
        self.prefill_side.manager.finish(room, aux(room))

    def whole(self, room: int) -> None:
        self.start(room)
        self.reserve(room)
        self.send(room)

    def arrives(self, room: int) -> None:
        self.run_until(lambda: bool(of(self.decode_side, Received, room)))
        assert (self.decode_side.slab[10:13] == self.prefill_side.slab[0:3]).all()

    def passes(self, room: int) -> None:
        self.whole(room)
        self.arrives(room)


@pytest.fixture
def faulty() -> Iterator[FaultyPair]:
    made = FaultyPair()
    yield made
    made.close()


def rules(injector: Injector, *given: FaultRule) -> None:
    injector.change(FaultChange(rules=list(given)))


def release(injector: Injector) -> None:
    injector.change(FaultChange(rules=[], release=True))


def held(injector: Injector) -> list[tuple[str, str | None, int | None]]:
    return [(entry.where, entry.kind, entry.room) for entry in injector.report().held]


def both_failed(pair: FaultyPair, room: int) -> bool:
    return bool(of(pair.prefill_side, Failed, room)) and bool(of(pair.decode_side, Failed, room))


# ---- the decisions ----------------------------------------------------------------------------------------


def injector(*given: FaultRule, seed: int = 0) -> Injector:
    return Injector(TransferStats(CollectorRegistry(), backend="fake"), seed=seed, rules=given)


def fired(made: Injector, times: int = 40) -> list[bool]:
    return [made.decide("send", "reserve", i) is not None for i in range(times)]


def test_the_same_seed_and_sequence_give_the_same_decisions() -> None:
    rule = FaultRule(where="send", action="drop", probability=0.5)
    first, again, other = injector(rule, seed=7), injector(rule, seed=7), injector(rule, seed=8)
    decided = fired(first)
    assert decided == fired(again) != fired(other)
    assert 5 < sum(decided) < 35
    first.change(FaultChange(seed=7))
    assert fired(first) == decided


def test_skip_count_kind_and_room_narrow_a_rule_and_everything_is_counted() -> None:
    made = injector(FaultRule(where="send", action="drop", kind="reserve", skip=2, count=3))
    assert [i for i, yes in enumerate(fired(made, 10)) if yes] == [2, 3, 4]
    assert made.decide("send", "complete", 1) is None
    assert made.decide("receive", "reserve", 1) is None
    (report,) = made.report().rules
    assert (report.matched, report.fired) == (10, 3)
    made.change(FaultChange(rules=[FaultRule(where="send", action="drop", room=5)]))
    assert [i for i, yes in enumerate(fired(made, 10)) if yes] == [5]


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"where": "write", "action": "drop"}, "action"),
        ({"where": "receive", "action": "corrupt"}, "action"),
        ({"where": "compute", "action": "hold", "room": 1}, "room"),
        ({"where": "write", "action": "stall", "kind": "reserve"}, "kind"),
        ({"where": "send", "action": "delay"}, "seconds"),
        ({"where": "send", "action": "drop", "seconds": 1}, "seconds"),
        ({"where": "write", "action": "corrupt", "how": "noise"}, "how"),
    ],
)
def test_fields_that_do_not_go_together_are_named(rule: dict[str, object], field: str) -> None:
    change = msgspec.convert({"rules": [rule]}, FaultChange)
    found = change.problem()
    assert found is not None
    assert found[0] == f"rules[0].{field}"


def test_rules_on_the_command_line_are_checked_by_their_fields() -> None:
    assert parse_rules('[{"where": "send", "action": "drop"}]') == [FaultRule(where="send", action="drop")]
    for text in ("[", '[{"where": "send"}]', '[{"where": "send", "action": "stall"}]'):
        with pytest.raises(StartupError, match=r"--fault-injection-rules: .*(action|truncated)"):
            parse_rules(text)


def test_a_gate_lets_one_step_through_for_each_release() -> None:
    made = injector(FaultRule(where="compute", action="hold", skip=1))
    assert [made.may("compute") for _ in range(3)] == [True, False, False]
    assert made.may("preallocate")
    made.change(FaultChange(release=True))
    assert [made.may("compute") for _ in range(2)] == [True, False]
    assert made.report().rules[0].fired == 2


def test_corrupted_messages_never_decode() -> None:
    frames = wire.encode("a", "b", wire.Reserve(room=1, lease=1, pages=list(range(40)), num_prompt_tokens=9))
    random = Random(3)
    for how in ("noise", "truncate", "version", None):
        for _ in range(50):
            with pytest.raises(wire.WireError):
                wire.decode(corrupt(frames, how, random))  # type: ignore[arg-type]
    assert len(corrupt(frames, "oversize", random)[1]) > wire.MAX_CONTROL_BYTES


# ---- messages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["send", "receive"])
def test_held_complete_keeps_decode_receiving_until_the_release(faulty: FaultyPair, where: Where) -> None:
    at = faulty.prefill_faults if where == "send" else faulty.decode_faults
    rules(at, FaultRule(where=where, action="hold", kind="complete"))
    faulty.whole(1)
    faulty.run_until(lambda: held(at) == [(where, "complete", 1)])
    assert of(faulty.prefill_side, Sent, 1)
    assert faulty.decode_side.manager.state(1) is ReceiverState.RECEIVING
    release(at)
    faulty.arrives(1)
    assert held(at) == []
    assert faulty.prefill_side.metric("faults_injected_total", where=where, action="hold") == (
        where == "send"
    )
    faulty.passes(2)


def test_held_hello_lookup_and_reserve_keep_the_early_states(faulty: FaultyPair) -> None:
    rules(
        faulty.decode_faults, *(FaultRule(where="send", action="hold", kind=k) for k in ("hello", "reserve"))
    )
    faulty.start(1)
    faulty.run_until(lambda: held(faulty.decode_faults) == [("send", "hello", None)])
    assert faulty.decode_side.manager.state(1) is ReceiverState.HANDSHAKING
    faulty.decode_faults.change(FaultChange(release=True))
    faulty.reserve(1)
    assert held(faulty.decode_faults) == [("send", "reserve", 1)]
    assert faulty.decode_side.manager.state(1) is ReceiverState.RECEIVING
    assert faulty.prefill_side.manager.state(1) is SenderState.AWAITING_DESTINATION
    release(faulty.decode_faults)
    faulty.send(1)
    faulty.arrives(1)
    # Both workers know each other by now: a look-up is what is left of the handshake.
    rules(faulty.decode_faults, FaultRule(where="lookup", action="hold"))
    faulty.start(2)
    faulty.run_for(0.05)
    assert held(faulty.decode_faults) == [("lookup", None, None)]
    assert faulty.decode_side.manager.state(2) is ReceiverState.HANDSHAKING
    release(faulty.decode_faults)
    faulty.reserve(2)
    faulty.send(2)
    faulty.arrives(2)


def test_a_dropped_reservation_ends_in_the_deadlines(faulty: FaultyPair) -> None:
    rules(faulty.decode_faults, FaultRule(where="send", action="drop", kind="reserve", count=1))
    faulty.start(1)
    faulty.reserve(1)
    faulty.run_until(lambda: both_failed(faulty, 1))
    faulty.run_until(lambda: bool(of(faulty.decode_side, Drained, 1)))
    faulty.passes(2)


def test_duplicates_of_every_message_change_nothing(faulty: FaultyPair) -> None:
    for at in (faulty.prefill_faults, faulty.decode_faults):
        rules(at, FaultRule(where="send", action="duplicate"))
    faulty.passes(1)
    faulty.passes(2)
    faulty.start(3)
    faulty.reserve(3)
    faulty.decode_side.manager.abort(3, "the client left")
    faulty.run_until(
        lambda: bool(of(faulty.decode_side, Drained, 3)) and bool(of(faulty.prefill_side, Failed, 3))
    )
    for side in faulty.sides:
        assert len(of(side, Failed, 3)) == 1
        assert not of(side, Failed, 1)
    assert faulty.decode_side.metric("faults_injected_total", where="send", action="duplicate") >= 4
    faulty.passes(4)


def test_a_delayed_message_leaves_when_its_time_has_come(faulty: FaultyPair) -> None:
    rules(faulty.prefill_faults, FaultRule(where="send", action="delay", kind="complete", seconds=0.2))
    faulty.whole(1)
    began = time.monotonic()
    deadline = faulty.prefill_side.manager.next_deadline()
    assert deadline is not None
    assert deadline <= began + 0.2
    faulty.arrives(1)
    assert time.monotonic() - began > 0.15


def test_a_reordered_message_comes_after_the_next_one(faulty: FaultyPair) -> None:
    faulty.passes(1)
    rules(faulty.prefill_faults, FaultRule(where="send", action="reorder", kind="complete", count=1))
    faulty.whole(2)
    faulty.run_until(lambda: held(faulty.prefill_faults) == [("send", "complete", 2)])
    faulty.prefill_side.manager.open(3)
    faulty.decode_side.manager.open(3, "127.0.0.1", faulty.service.port)
    faulty.run_until(lambda: bool(of(faulty.decode_side, HandshakeDone, 3)))
    faulty.decode_side.manager.reserve(3, [20, 21, 22], 12)
    faulty.send(3)
    faulty.run_until(lambda: bool(of(faulty.decode_side, Received, 2)))
    order = [event.room for event in faulty.decode_side.events if isinstance(event, Received)]
    assert order == [1, 3, 2]


@pytest.mark.parametrize("how", ["noise", "truncate", "version", "oversize"])
def test_corrupted_reservations_harm_nobody_else(faulty: FaultyPair, how: str) -> None:
    rule = {"where": "send", "action": "corrupt", "kind": "reserve", "count": 1, "how": how}
    rules(faulty.decode_faults, msgspec.convert(rule, FaultRule))
    faulty.start(1)
    faulty.reserve(1)
    faulty.run_until(lambda: both_failed(faulty, 1))
    faulty.run_until(lambda: bool(of(faulty.decode_side, Drained, 1)))
    faulty.passes(2)


# ---- writes -----------------------------------------------------------------------------------------------


def test_stalled_writes_keep_prefill_finishing_until_the_release(faulty: FaultyPair) -> None:
    rules(faulty.prefill_faults, FaultRule(where="write", action="stall"))
    before = faulty.decode_side.slab.clone()
    faulty.whole(1)
    faulty.run_for(0.05)
    assert held(faulty.prefill_faults) == [("write", None, 1)] * 2
    assert faulty.prefill_side.manager.state(1) is SenderState.FINISHING
    assert (faulty.decode_side.slab == before).all()
    release(faulty.prefill_faults)
    faulty.arrives(1)


def test_an_abort_while_a_write_is_stalled_drains_after_the_release(faulty: FaultyPair) -> None:
    rules(faulty.prefill_faults, FaultRule(where="write", action="stall", count=1))
    faulty.whole(1)
    faulty.decode_side.manager.abort(1, "the client left")
    faulty.run_until(lambda: both_failed(faulty, 1))
    faulty.run_for(0.05)
    assert faulty.prefill_side.manager.state(1) is SenderState.DRAINING
    assert faulty.decode_side.manager.state(1) is ReceiverState.DRAINING
    release(faulty.prefill_faults)
    faulty.run_until(
        lambda: bool(of(faulty.decode_side, Drained, 1)) and bool(of(faulty.prefill_side, Drained, 1))
    )
    faulty.passes(2)


def test_a_stalled_write_is_abandoned_with_its_peer(faulty: FaultyPair) -> None:
    rules(faulty.prefill_faults, FaultRule(where="write", action="stall"))
    faulty.whole(1)
    faulty.drop(faulty.decode_side)
    faulty.run_until(lambda: bool(of(faulty.prefill_side, Failed, 1)))
    # In one process the probe can't find the peer dead; what it would cause is this.
    backend = faulty.prefill_side.manager._parts.backend
    backend.disconnect(faulty.decode_side.identity.instance_id)
    faulty.run_until(lambda: bool(of(faulty.prefill_side, Drained, 1)))
    assert held(faulty.prefill_faults) == []


def test_a_failed_write_writes_nothing_and_says_that_it_was_injected(faulty: FaultyPair) -> None:
    rules(faulty.prefill_faults, FaultRule(where="write", action="fail", skip=1, count=1))
    before = faulty.decode_side.slab[12].clone()
    faulty.whole(1)
    faulty.run_until(lambda: both_failed(faulty, 1))
    (event,) = of(faulty.prefill_side, Failed, 1)
    assert isinstance(event, Failed)
    assert "injected fault" in event.reason
    faulty.run_until(lambda: bool(of(faulty.decode_side, Drained, 1)))
    assert (faulty.decode_side.slab[12] == before).all()
    faulty.passes(2)


def test_bytes_of_a_write_that_failed_land_at_the_release_while_its_pages_are_quarantined(
    faulty: FaultyPair,
) -> None:
    rules(
        faulty.prefill_faults,
        FaultRule(where="write", action="fail_late", count=1),
        FaultRule(where="send", action="hold", kind="drained"),
    )
    before = faulty.decode_side.slab[10:12].clone()
    faulty.whole(1)
    faulty.run_until(lambda: both_failed(faulty, 1))
    faulty.run_for(0.05)
    assert faulty.decode_side.manager.state(1) is ReceiverState.DRAINING
    assert (faulty.decode_side.slab[10:12] == before).all()
    release(faulty.prefill_faults)
    faulty.run_until(lambda: bool((faulty.decode_side.slab[10:12] == faulty.prefill_side.slab[0:2]).all()))
    assert faulty.decode_side.metric("quarantined_pages") == 3
    faulty.run_until(lambda: bool(of(faulty.decode_side, Drained, 1)))
    faulty.passes(2)


def test_a_corrupted_write_puts_one_wrong_page_down(faulty: FaultyPair) -> None:
    rules(faulty.prefill_faults, FaultRule(where="write", action="corrupt", count=1))
    faulty.whole(1)
    faulty.run_until(lambda: bool(of(faulty.decode_side, Received, 1)))
    same = [bool((faulty.decode_side.slab[10 + i] == faulty.prefill_side.slab[i]).all()) for i in range(3)]
    assert sorted(same) == [False, True, True]


def test_wrapped_backends_keep_their_name(faulty: FaultyPair) -> None:
    assert faulty.prefill_side.manager._parts.backend.name == "fake"


def test_a_reservation_repeated_after_its_end_changes_nothing(faulty: FaultyPair) -> None:
    """After a clean end, and after one that leaves bytes on the wire for a while."""
    for room, failing in ((1, False), (2, True)):
        # The first of two equal messages passes, the second waits.
        rules(
            faulty.prefill_faults,
            FaultRule(where="receive", action="hold", kind="reserve", skip=1),
            *([FaultRule(where="write", action="fail")] if failing else []),
        )
        rules(faulty.decode_faults, FaultRule(where="send", action="duplicate", kind="reserve"))
        faulty.whole(room)
        if failing:
            faulty.run_until(lambda room=room: both_failed(faulty, room))
        else:
            faulty.arrives(room)
        faulty.run_until(lambda: bool(held(faulty.prefill_faults)))
        before = faulty.decode_side.metric("control_dropped_total", reason="foreign")
        rules(faulty.decode_faults)
        release(faulty.prefill_faults)
        began = time.monotonic()
        faulty.run_for(0.05)
        assert faulty.decode_side.metric("control_dropped_total", reason="foreign") == before
        if failing:
            faulty.run_until(lambda: bool(of(faulty.decode_side, Drained, 2)))
            assert time.monotonic() - began > faulty.settings.heartbeat_interval / 2
    faulty.passes(3)


@pytest.mark.parametrize(
    "body",
    [
        b'{"seed": 1208925819614629174706176}',
        b'{"rules": [{"where": "write", "action": "stall", "room": -1}]}',
    ],
)
def test_a_number_that_no_message_can_carry_is_refused_by_name(body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.(seed|rules\[0\]\.room)|out of range"):
        msgspec.json.decode(body, type=FaultChange)
