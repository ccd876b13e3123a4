"""What a story of one prefill worker, `p0`, and one decode worker, `d0`, is told with."""

from __future__ import annotations

from collections.abc import Callable

from diptych.kvtransfer.receiver import DecodeReceiver
from diptych.kvtransfer.sender import PrefillSender

from .network import Delivery
from .workers import DecodeUse, DecodeWorker, PrefillUse, PrefillWorker
from .world import World


def prefill(world: World) -> PrefillWorker:
    return world.prefills()[0]


def decode(world: World) -> DecodeWorker:
    return world.decodes()[0]


def turn(world: World, times: int = 3, *, without: Callable[[Delivery], bool] = lambda _: False) -> None:
    """Messages arrive, but for some; look-ups end, loops turn; writes hang."""
    for _ in range(times):
        for delivery in world.network.deliverable():
            if not without(delivery):
                world.network.deliver(delivery)
        for process in world.running:
            while process.pool.work:
                process.pool.run(0)
            world.step(process)


def reserved(world: World, room: int) -> tuple[PrefillUse, DecodeUse]:
    """A room with a destination, and nothing computed."""
    prefill(world).open(room, 4, checked=True)
    world.open_at_decode(decode(world), room, 4, "p0")
    sending, receiving = prefill(world).uses[room], decode(world).uses[room]
    turn(world)
    decode(world).reserve(receiving, 0)
    turn(world, 1)
    assert sending.has_destination
    return sending, receiving


def sender(world: World) -> PrefillSender:
    return prefill(world).sender


def receiver(world: World) -> DecodeReceiver:
    return decode(world).receiver
