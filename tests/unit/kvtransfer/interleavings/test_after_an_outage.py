"""What an outage leaves under way must not hit the first request after it."""

from __future__ import annotations

from diptych.kvtransfer import wire
from diptych.kvtransfer.events import Failed
from diptych.kvtransfer.states import ReceiverState

from .network import Connection, Delivery
from .settle import run_to_rest
from .stories import decode, prefill, receiver, reserved, turn
from .world import HEARTBEAT, World


def links_of(world: World, slot: str) -> list[Connection]:
    """Those in use, oldest first."""
    name = world.processes[slot].instance_id
    return [c for c in world.network.connections if c.owner.instance_id == name and not c.closed]


def meet(world: World) -> tuple[Connection, Connection]:
    """Prefill's link to decode, and decode's to prefill."""
    world.open_at_decode(decode(world), 1, 4, "p0")
    turn(world)
    receiver(world).abort(1, "the client left")
    turn(world)
    [there], [back] = links_of(world, "p0"), links_of(world, "d0")
    return there, back


def lose(world: World, slot: str, link: Connection) -> None:
    """That side finds out that its link is broken, and everything in it is gone."""
    world.cut(link, keeps=False, noticed=True)
    world.step(world.processes[slot])


def body_of(delivery: Delivery) -> wire.ControlMessage:
    connection = delivery.connection
    return wire.decode((connection.back if delivery.is_answer else connection.there)[0]).body


def under_way(world: World, kind: type[wire.ControlMessage]) -> list[Delivery]:
    return [delivery for delivery in world.network.deliverable() if isinstance(body_of(delivery), kind)]


def say_hello(world: World, room: int) -> None:
    """Decode opens the room, looks prefill up and greets it; prefill has yet to read it."""
    world.open_at_decode(decode(world), room, 4, "p0")
    world.processes["d0"].pool.run(0)
    world.step(world.processes["d0"])
    [hello] = under_way(world, wire.Hello)
    world.network.deliver(hello)


def assert_is_received(world: World, room: int) -> None:
    """It goes on as if there had been no outage."""
    use = decode(world).uses[room]
    assert use.agreed, use
    prefill(world).open(room, 4, checked=True)
    decode(world).reserve(use, 0)
    turn(world)
    assert prefill(world).uses[room].has_destination
    world.fabric.stalled = False
    world.compute(prefill(world), room, 1)
    run_to_rest(world, within=30)
    assert not isinstance(use.terminal, Failed), use


def test_word_of_a_loss_that_comes_after_the_next_hello_fails_no_room_of_that(world: World) -> None:
    """It waited on a connection that TCP could make only some time after the outage."""
    there, back = meet(world)
    lose(world, "p0", there)
    lose(world, "d0", back)
    [word] = under_way(world, wire.Refused)
    say_hello(world, 2)
    world.step(world.processes["p0"])
    world.network.deliver(word)
    world.step(world.processes["d0"])
    assert receiver(world).state(2) is ReceiverState.HANDSHAKING
    turn(world)
    assert_is_received(world, 2)


def test_word_of_a_loss_that_comes_before_prefill_has_read_the_next_hello_fails_no_room_of_that(
    world: World,
) -> None:
    there, back = meet(world)
    lose(world, "p0", there)
    lose(world, "d0", back)
    [word] = under_way(world, wire.Refused)
    say_hello(world, 2)
    world.network.deliver(word)
    world.step(world.processes["d0"])
    turn(world)
    assert_is_received(world, 2)


def test_link_that_the_next_hello_has_replaced_may_break_without_harm(world: World) -> None:
    """Decode noticed the outage first; prefill reads of the hello and of the break in one turn."""
    there, back = meet(world)
    lose(world, "d0", back)
    say_hello(world, 2)
    lose(world, "p0", there)
    turn(world)
    assert_is_received(world, 2)


def test_prefill_answers_a_hello_over_a_new_link(world: World) -> None:
    """The one it has may be broken without its knowledge: what is sent over it is lost."""
    there, back = meet(world)
    lose(world, "d0", back)
    world.network.cut(there, keeps=False)
    say_hello(world, 2)
    turn(world)
    assert_is_received(world, 2)


def test_welcome_of_an_earlier_hello_is_none_for_the_next(world: World) -> None:
    """Prefill may have lost that contact since, and would refuse what is reserved."""
    world.open_at_decode(decode(world), 1, 4, "p0")
    turn(world, 2, without=lambda delivery: isinstance(body_of(delivery), wire.Welcome))
    [welcome] = under_way(world, wire.Welcome)
    [there], [back] = links_of(world, "p0"), links_of(world, "d0")
    world.cut(there, keeps=True, noticed=True)
    lose(world, "d0", back)
    world.step(world.processes["p0"])
    say_hello(world, 2)
    world.network.deliver(welcome)
    world.step(world.processes["d0"])
    assert receiver(world).state(2) is ReceiverState.HANDSHAKING
    turn(world)
    assert_is_received(world, 2)


def test_room_of_a_contact_that_prefill_alone_has_lost_may_be_tried_again(world: World) -> None:
    """Decode hasn't heard of it yet when the network works again: 503, since prefill took nothing."""
    there, _ = meet(world)
    world.open_at_decode(decode(world), 2, 4, "p0")
    turn(world, 1)
    lose(world, "p0", there)
    decode(world).reserve(decode(world).uses[2], 0)
    turn(
        world, without=lambda delivery: delivery in under_way(world, wire.Refused) and not delivery.is_answer
    )
    failed = decode(world).draining[2].terminal
    assert isinstance(failed, Failed)
    assert failed.status == 503


def test_room_that_was_not_reserved_when_prefill_lost_the_contact_may_be_tried_again(world: World) -> None:
    there, _ = meet(world)
    _, reserved_one = reserved(world, 2)
    world.open_at_decode(decode(world), 3, 4, "p0")
    turn(world, 1)
    waiting = decode(world).uses[3]
    lose(world, "p0", there)
    turn(world)
    assert isinstance(waiting.terminal, Failed)
    assert waiting.terminal.status == 503
    assert isinstance(reserved_one.terminal, Failed)
    assert reserved_one.terminal.status == 502


def test_hello_takes_a_new_link_although_an_old_request_still_has_one(world: World) -> None:
    """The one by which decode asks for its pages may be broken without its knowledge."""
    reserved(world, 1)
    [there], [back] = links_of(world, "p0"), links_of(world, "d0")
    lose(world, "p0", there)
    lose(world, "d0", back)
    world.now += 2 * HEARTBEAT
    world.step(world.processes["d0"])
    [asking] = links_of(world, "d0")
    world.network.cut(asking, keeps=False)
    world.processes["d0"].pool.work.clear()
    say_hello(world, 2)
    turn(world)
    assert_is_received(world, 2)


def test_hello_that_comes_behind_a_later_one_begins_nothing(world: World) -> None:
    """Of the contact that lasts, a loss must still be heard."""
    world.open_at_decode(decode(world), 1, 4, "p0")
    turn(world, 1)
    [back] = links_of(world, "d0")
    world.cut(back, keeps=True, noticed=True)
    world.step(world.processes["d0"])
    [first] = under_way(world, wire.Hello)
    world.open_at_decode(decode(world), 2, 4, "p0")
    turn(world, without=lambda delivery: delivery.connection is first.connection)
    use = decode(world).uses[2]
    assert use.agreed
    world.network.deliver(first)
    turn(world)
    assert use.terminal is None
    [there] = links_of(world, "p0")
    lose(world, "p0", there)
    turn(world)
    assert isinstance(use.terminal, Failed)


def test_look_up_that_began_in_an_outage_fails_no_room_that_was_opened_after_it(world: World) -> None:
    """It fails only when its patience ends, and the room would have been found meanwhile."""
    world.stop(world.processes["p0"])
    world.open_at_decode(decode(world), 1, 4, "p0")
    old = decode(world).uses[1]
    pool = world.processes["d0"].pool
    answer = pool.work.pop(0)
    answer()
    world.go_on(world.processes["p0"])
    world.open_at_decode(decode(world), 2, 4, "p0")
    assert not pool.work
    turn(world, 6)
    assert isinstance(old.terminal, Failed)
    assert "can't be reached" in old.terminal.reason
    assert_is_received(world, 2)
