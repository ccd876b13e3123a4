"""What arbitrary interleavings have found, each as its own story."""

from __future__ import annotations

import msgspec
import pytest

from diptych.kvtransfer.errors import DuplicateRoom
from diptych.kvtransfer.events import Failed, Received, Sent
from diptych.kvtransfer.states import ReceiverState, SenderState

from .settle import check_that_every_pair_works, heal, run_to_rest
from .stories import decode, prefill, receiver, reserved, sender, turn
from .world import FINGERPRINT, HEARTBEAT, World


def test_room_is_not_taken_again_before_its_end_was_reported_at_prefill(world: World) -> None:
    """The event would be taken for one of the second request."""
    sending, _ = reserved(world, 1)
    world.fabric.stalled = False
    world.compute(prefill(world), 1, 1)
    assert sender(world).state(1) is None
    with pytest.raises(DuplicateRoom):
        sender(world).open(1)
    turn(world)
    assert sending.terminal == Sent(1)
    sender(world).open(1)


def test_room_is_not_taken_again_before_its_end_was_reported_at_decode(world: World) -> None:
    world.open_at_decode(decode(world), 1, 4, "p0")
    receiver(world).abort(1, "the client left")
    with pytest.raises(DuplicateRoom):
        receiver(world).open(1, "p0", 80)
    turn(world)
    receiver(world).open(1, "p0", 80)


def test_word_to_a_dead_decode_worker_does_not_fail_its_successor(world: World) -> None:
    """The successor answers for the dead one; it is not the one that is lost."""
    reserved(world, 1)
    world.compute(prefill(world), 1, 1)
    world.kill("d0", keeps=False)
    world.start("d0")
    world.advance(2 * HEARTBEAT)
    turn(world)
    assert sender(world).state(1) in (None, SenderState.DRAINING)
    sending, receiving = reserved(world, 2)
    for write in list(world.fabric.in_flight):
        world.fabric.fail(write, "the peer is gone")
    turn(world)
    assert sending.terminal is None
    world.fabric.stalled = False
    world.compute(prefill(world), 2, 1)
    turn(world)
    assert isinstance(sending.terminal, Sent)
    assert isinstance(receiving.terminal, Received)


def test_late_reservation_of_a_decode_worker_proven_dead_is_not_honoured(world: World) -> None:
    """Its connection is gone with it: a write for it would have nowhere to go."""
    reserved(world, 1)
    world.compute(prefill(world), 1, 1)
    prefill(world).open(2, 4, checked=True)
    world.open_at_decode(decode(world), 2, 4, "p0")
    turn(world, 1)
    decode(world).reserve(decode(world).uses[2], 0)
    sender(world).abort(1, "the client left")
    world.step(world.processes["p0"])
    world.kill("d0", keeps=True)
    world.now += 2 * HEARTBEAT
    world.step(world.processes["p0"])
    world.processes["p0"].pool.run(0)
    world.step(world.processes["p0"])
    for delivery in world.network.deliverable():
        world.network.deliver(delivery)
    world.step(world.processes["p0"])
    assert not prefill(world).uses[2].has_destination
    assert not world.fabric.in_flight


def test_worker_whose_welcome_was_lost_is_greeted_again(world: World) -> None:
    """Otherwise no request would ever pass between the two again."""
    world.open_at_decode(decode(world), 1, 4, "p0")
    turn(world, 1)
    [hello] = world.network.deliverable()
    world.network.deliver(hello)
    # Prefill's welcome is lost, and so is its word that it has given the decode worker up.
    for _ in range(3):
        world.step(world.processes["p0"])
        for connection in world.network.connections:
            if connection.owner.instance_id.startswith("p0"):
                world.cut(connection, keeps=False, noticed=True)
    turn(world)
    assert receiver(world).state(1) is ReceiverState.HANDSHAKING
    heal(world, [])
    run_to_rest(world, within=30)
    check_that_every_pair_works(world)


def test_abort_of_an_earlier_use_of_a_room_spares_the_reservation_of_a_later_one(world: World) -> None:
    """It came by a connection that broke, behind what the new one brought."""
    world.open_at_decode(decode(world), 1, 4, "p0")
    turn(world)
    receiver(world).abort(1, "the client left")
    world.step(world.processes["d0"])
    [link] = [c for c in world.network.connections if c.owner.instance_id.startswith("d0")]
    world.cut(link, keeps=True, noticed=True)
    world.step(world.processes["d0"])
    world.open_at_decode(decode(world), 1, 4, "p0")
    turn(world, without=lambda delivery: delivery.connection is link)
    decode(world).reserve(decode(world).uses[1], 0)
    newer = [d for d in world.network.deliverable() if d.connection is not link]
    for delivery in newer:
        world.network.deliver(delivery)
    turn(world)
    prefill(world).open(1, 4, checked=True)
    turn(world)
    assert prefill(world).uses[1].has_destination


def test_route_to_an_impossible_address_fails_the_request_and_nothing_else(world: World) -> None:
    world.processes["p0"].plane.address = "tcp://nowhere"
    world.trouble("p0#1")
    world.fingerprint_of_routes = msgspec.structs.replace(FINGERPRINT, page_size=8)
    world.open_at_decode(decode(world), 1, 4, "p0")
    use = decode(world).uses[1]
    turn(world)
    assert isinstance(use.terminal, Failed)
    assert use.terminal.drained


def test_worker_lost_under_one_name_is_looked_up_again_under_every_name(world: World) -> None:
    for room, name in ((1, "p0"), (2, "p0.")):
        world.open_at_decode(decode(world), room, 4, name)
        turn(world)
        assert decode(world).uses[room].agreed
        receiver(world).abort(room, "the client left")
    world.kill("p0", keeps=False)
    world.start("p0")
    world.advance(2 * HEARTBEAT)
    turn(world)
    for room, name in ((3, "p0"), (4, "p0.")):
        world.open_at_decode(decode(world), room, 4, name)
        turn(world)
        assert decode(world).uses[room].agreed


def test_reservation_that_comes_after_its_abort_is_not_honoured_ever(world: World) -> None:
    """Its connection broke, and the abort took the next one: decode's pages are another request's by then."""
    prefill(world).open(9, 4, checked=True)
    world.open_at_decode(decode(world), 1, 4, "p0")
    turn(world)
    decode(world).reserve(decode(world).uses[1], 0)
    [stale] = [c for c in world.network.connections if c.owner.instance_id.startswith("d0")]
    world.cut(stale, keeps=True, noticed=True)
    turn(world, without=lambda delivery: delivery.connection is stale)
    world.advance(4 * HEARTBEAT)
    turn(world, without=lambda delivery: delivery.connection is stale)
    assert receiver(world).state(1) is None
    for _ in range(2):  # the first learns that decode has given the room up
        prefill(world).open(1, 4, checked=True)
        world.step(world.processes["p0"])
    turn(world)
    assert not prefill(world).uses[1].has_destination


def test_word_that_an_earlier_use_of_a_room_has_drained_frees_nothing_of_a_later_one(world: World) -> None:
    """Decode had asked twice, and prefill answered twice."""
    reserved(world, 1)
    world.compute(prefill(world), 1, 1)
    receiver(world).abort(1, "the client left")
    turn(world)
    for write in list(world.fabric.in_flight):
        world.fabric.complete(write)
    world.step(world.processes["p0"])
    world.advance(2 * HEARTBEAT)
    world.step(world.processes["d0"])
    turn(world, without=lambda delivery: delivery.is_answer)
    assert not world.processes["d0"].worker.draining
    [second_answer] = [d for d in world.network.deliverable() if d.is_answer]
    prefill(world).open(1, 4, checked=True)
    world.open_at_decode(decode(world), 1, 4, "p0")
    turn(world, without=lambda delivery: delivery.is_answer)
    decode(world).reserve(decode(world).uses[1], 0)
    turn(world, without=lambda delivery: delivery.is_answer)
    world.compute(prefill(world), 1, 1)
    receiver(world).abort(1, "the client left")
    world.network.deliver(second_answer)
    world.step(world.processes["d0"])
    assert receiver(world).state(1) is ReceiverState.DRAINING
