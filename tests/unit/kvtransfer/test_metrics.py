"""Every metric of a transfer moves: on the sides that it is for, and for every reason that it names."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import zmq

from diptych.kvtransfer import wire
from diptych.kvtransfer.events import DestinationReady, Drained, Failed, HandshakeDone, Received, Sent
from diptych.kvtransfer.parts import TransferParts
from diptych.kvtransfer.sender import PrefillSender
from diptych.kvtransfer.states import ReceiverState, SenderState
from diptych.kvtransfer.stats import DropReason, FailureKind, HandshakeOutcome

from .conftest import Pair, Side, aux, make_fingerprint, of

BOTH = {"prefill", "decode"}
MOVED_BY = {
    "writes": {"prefill"},
    "pages": {"prefill"},
    "bytes": {"prefill"},
    "descriptors": {"prefill"},
    "post_seconds": {"prefill"},
    "write_seconds": {"prefill"},
    "write_bytes_per_second": {"prefill"},
    "handover_seconds": {"prefill"},
    "pages_received": {"decode"},
    "bytes_received": {"decode"},
    "handshake_seconds": {"decode"},
    "handshakes": BOTH,
    "rooms": BOTH,
    "rooms_done": BOTH,
    "checksum_seconds": BOTH,
    "quarantined_pages": BOTH,
    "failures": BOTH,
    "deadline_hits": BOTH,
    "control_dropped": BOTH,
}
ELSEWHERE = {"faults_injected", "connections_refused"}
"""By the tests of fault injection and of the cluster secret."""


class Watched:
    """A pair, and which of its metrics have ever been above zero on which side, by label."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.parts: list[TransferParts] = []
        pair.around = self._keep
        pair.settings = replace(pair.settings, checksum=True)
        self.prefill, self.decode = pair.prefill(), pair.decode()
        self.moved: dict[str, dict[str, set[str]]] = {}
        """By metric and side: values of the second label."""
        self._rooms = iter(range(1, 1000))

    def _keep(self, parts: TransferParts) -> TransferParts:
        self.parts.append(parts)
        return parts

    def look(self) -> None:
        for side in self.pair.sides:
            role = "prefill" if isinstance(side.manager, PrefillSender) else "decode"
            for family in side.registry.collect():
                sides = self.moved.setdefault(family.name.removeprefix("diptych_transfer_"), {})
                for sample in family.samples:
                    if sample.value > 0 and not sample.name.endswith("_created"):
                        labels = {
                            value for name, value in sample.labels.items() if name not in ("backend", "le")
                        }
                        sides.setdefault(role, set()).update(labels)

    def labels(self, metric: str) -> set[str]:
        return {label for of_side in self.moved[metric].values() for label in of_side}

    def sent(self, decode: Side | None = None) -> int:
        """A new room whose three pages are posted and held back."""
        decode = decode or self.decode
        room = next(self._rooms)
        self.pair.fabric.stalled = True
        self.prefill.manager.open(room)
        decode.manager.open(room, "127.0.0.1", self.pair.service.port)
        self.pair.run_until(lambda: bool(of(decode, HandshakeDone, room)))
        decode.manager.reserve(room, [20, 21, 2], 12)
        self.pair.run_until(lambda: bool(of(self.prefill, DestinationReady, room)))
        self.prefill.manager.send(room, [3, 4, 9], 0)
        return room

    def land(self) -> None:
        for write in list(self.pair.fabric.in_flight):
            self.pair.fabric.complete(write)

    def failed(self, room: int) -> None:
        self.pair.run_until(lambda: all(of(side, Failed, room) for side in (self.prefill, self.decode)))
        self.look()
        self.land()
        self.pair.run_until(lambda: bool(of(self.decode, Drained, room)))
        self.look()


@pytest.fixture
def watched(pair: Pair) -> Watched:
    return Watched(pair)


def test_a_room_that_passes_counts_what_moved(watched: Watched) -> None:
    prefill, decode = watched.prefill, watched.decode
    room = watched.sent()
    assert prefill.metric("rooms", state="sending") == decode.metric("rooms", state="receiving") == 1
    watched.land()
    prefill.manager.finish(room, aux(room))
    watched.pair.run_until(lambda: bool(of(decode, Received, room)) and bool(of(prefill, Sent, room)))
    values = {"writes_total": 1, "pages_total": 3, "bytes_total": 192, "descriptors_total": 2}
    values |= {"post_seconds_count": 1, "write_seconds_count": 1, "write_bytes_per_second_count": 1}
    values |= {"handover_seconds_count": 1}
    assert {name: prefill.metric(name) for name in values} == values
    received = {"pages_received_total": 3, "bytes_received_total": 192, "handshake_seconds_count": 1}
    assert {name: decode.metric(name) for name in received} == received
    for side, states in ((prefill, SenderState), (decode, ReceiverState)):
        assert side.metric("rooms_done_total") == 1
        assert side.metric("handshakes_total", outcome="accepted") == 1
        assert side.metric("checksum_seconds_count") == 1
        assert sum(side.metric("rooms", state=state.value) for state in states) == 0


def test_a_failed_room_counts_its_pages_until_they_are_safe(watched: Watched) -> None:
    room = watched.sent()
    watched.decode.manager.abort(room, "the client left")
    watched.pair.run_until(lambda: bool(of(watched.prefill, Failed, room)))
    sides = (watched.prefill, watched.decode)
    assert [side.metric("quarantined_pages") for side in sides] == [3, 3]
    assert [side.metric("rooms", state="draining") for side in sides] == [1, 1]
    watched.land()
    watched.pair.run_until(lambda: bool(of(watched.decode, Drained, room)))
    assert [side.metric("quarantined_pages") for side in sides] == [0, 0]
    assert [side.metric("write_seconds_count") for side in sides] == [1, 0]


def test_the_speed_of_a_write_that_failed_is_not_counted(watched: Watched) -> None:
    room = watched.sent()
    for write in list(watched.pair.fabric.in_flight):
        watched.pair.fabric.fail(write, "cable cut")
    watched.failed(room)
    assert watched.prefill.metric("write_seconds_count") == 1
    assert watched.prefill.metric("write_bytes_per_second_count") == 0


def test_every_label_is_there_before_it_first_moves(watched: Watched) -> None:
    for side in (watched.prefill, watched.decode):
        for metric, label, values in (
            ("failures_total", "kind", get_args(FailureKind)),
            ("control_dropped_total", "reason", get_args(DropReason)),
            ("handshakes_total", "outcome", get_args(HandshakeOutcome)),
        ):
            for value in values:
                name, labels = f"diptych_transfer_{metric}", {"backend": "fake", label: value}
                assert side.registry.get_sample_value(name, labels) == 0


def passing(watched: Watched) -> None:
    room = watched.sent()
    watched.look()
    watched.land()
    watched.prefill.manager.finish(room, aux(room))
    watched.pair.run_until(lambda: bool(of(watched.decode, Received, room)))


def failing(watched: Watched) -> None:
    """Each kind of failure that lets both workers live."""
    prefill, decode, pair = watched.prefill, watched.decode, watched.pair
    room = watched.sent()
    decode.manager.abort(room, "abort and peer")
    watched.failed(room)
    room = watched.sent()
    watched.land()
    decode.slab[20, 0] ^= 1
    prefill.manager.finish(room, aux(room))
    watched.failed(room)
    room = watched.sent()
    watched.land()
    prefill.manager.finish(room, aux(room, prompt_tokens=11))  # protocol
    watched.failed(room)
    room = watched.sent()
    for write in list(pair.fabric.in_flight):
        pair.fabric.fail(write, "write, and peer_lost at decode")
    watched.failed(room)
    decode.manager.open(500, "127.0.0.1", 1)  # lookup
    pair.run_until(lambda: bool(of(decode, Failed, 500)))
    other = pair.decode(fingerprint=make_fingerprint(page_size=8))
    other.manager.open(501, "127.0.0.1", pair.service.port)  # mismatch
    pair.run_until(lambda: bool(of(other, Failed, 501)))
    watched.look()
    pair.drop(other)


def passing_deadlines(watched: Watched) -> None:
    pair = watched.pair
    pair.settings = replace(pair.settings, receive_timeout=0.2)
    hasty = pair.decode()
    room = watched.sent(hasty)
    pair.run_until(lambda: bool(of(hasty, Failed, room)))
    watched.look()
    watched.land()
    pair.run_until(lambda: bool(of(hasty, Drained, room)))
    pair.drop(hasty)
    pair.settings = replace(pair.settings, bootstrap_timeout=0.2)
    patient = pair.prefill(registered=False)
    patient.manager.open(502)
    pair.run_until(lambda: bool(of(patient, Failed, 502)))
    watched.look()
    pair.drop(patient)


def dropping(watched: Watched) -> None:
    """Messages that no well-behaved peer sends, and a reservation that can't be."""
    drained = wire.RoomDrained(room=1, lease=999, clean=True)
    complete = wire.Complete(room=999, lease=1, num_pages=0, aux=aux(999))
    for side, strange, foreign in (
        (watched.prefill, drained, wire.Verified(room=999, lease=1)),
        (watched.decode, wire.Verified(room=1, lease=1), complete),
    ):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(side.manager.control_address)
        name = side.identity.instance_id
        stranger.send_multipart([b"DPTC\x02", b"\xc1"])
        stranger.send_multipart([b"DPTC\x63", b""])
        stranger.send_multipart(wire.encode("me", "somebody else", strange))
        stranger.send_multipart(wire.encode("me", name, strange))
        stranger.send_multipart(wire.encode("me", name, foreign))
        reasons = set(get_args(DropReason)) - {"refused"}
        watched.pair.run_until(
            lambda side=side, reasons=reasons: all(
                side.metric("control_dropped_total", reason=reason) for reason in reasons
            )
        )
        watched.look()
        stranger.close()
        context.term()
    watched.prefill.manager.open(503)
    watched.decode.manager.open(503, "127.0.0.1", watched.pair.service.port)
    watched.pair.run_until(lambda: bool(of(watched.decode, HandshakeDone, 503)))
    watched.decode.manager.reserve(503, [0, 1, 9999], 12)
    watched.pair.run_until(lambda: bool(of(watched.decode, Failed, 503)))
    watched.look()


def losing(watched: Watched) -> None:
    """Decode's control port closes under a room whose writes are in flight."""
    pair, prefill, decode = watched.pair, watched.prefill, watched.decode
    room = watched.sent()
    parts = next(parts for parts in watched.parts if parts.identity == decode.identity)
    parts.control.unlink(prefill.identity.instance_id)
    parts.control.close()
    pair.sides.remove(decode)
    pair.run_until(lambda: bool(of(prefill, Failed, room)))
    watched.look()
    parts.backend.close()
    parts.background.close()


def refusing(watched: Watched) -> None:
    """A hello from a worker to which writes are still in flight although it was lost."""
    pair, prefill, decode = watched.pair, watched.prefill, watched.decode
    first, second = watched.sent(), watched.sent()
    failing_write = next(w for w in pair.fabric.in_flight)
    pair.fabric.fail(failing_write, "one of two")
    pair.run_until(lambda: all(of(decode, Failed, room) for room in (first, second)))
    prefill.manager.open(504)
    decode.manager.open(504, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(decode, Failed, 504)))
    watched.look()
    watched.land()
    prefill.manager.abort(504, "over")
    pair.run_until(lambda: all(of(decode, Drained, room) for room in (first, second)))


def test_every_metric_moves_on_the_sides_it_is_for_and_for_every_reason_it_names(watched: Watched) -> None:
    for part in (passing, failing, passing_deadlines, dropping, refusing, losing):
        part(watched)
        watched.look()
    assert {
        metric: set(sides) for metric, sides in watched.moved.items() if metric not in ELSEWHERE
    } == MOVED_BY
    assert set(watched.moved) == set(MOVED_BY) | ELSEWHERE
    assert watched.labels("failures") == set(get_args(FailureKind))
    assert watched.labels("control_dropped") == set(get_args(DropReason))
    assert watched.labels("handshakes") == set(get_args(HandshakeOutcome))
