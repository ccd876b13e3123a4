"""Heal everything, let it run as real loops would, and look at what is left."""

from __future__ import annotations

import itertools

from diptych.kvtransfer.events import Received, Sent

from .workers import DecodeWorker, PrefillWorker, num_pages
from .world import HEARTBEAT, NUM_PAGES, World

_ATTEMPTS = 3


def heal(world: World, slots: list[str]) -> None:
    """Every process runs."""
    for process in list(world.processes.values()):
        if process.stopped:
            world.go_on(process)
    for slot in slots:
        if slot not in world.processes:
            world.start(slot)
    world.check()


def run_to_rest(world: World, *, within: float) -> None:
    """Steps a process only when something would have woken its loop. Fails when anything is left after
    `within` seconds."""
    end = world.now + within
    while True:
        _run_now(world)
        deadlines = [d for p in world.running if (d := p.manager.next_deadline()) is not None]
        if not deadlines and world.network.at_rest and not world.fabric.in_flight:
            return
        assert world.now <= end, f"not at rest after {within} s: {left(world)}"
        # The network has no deadlines of its own: breaks are noticed within two heartbeats.
        wait = min((d - world.now for d in deadlines), default=HEARTBEAT)
        world.advance(max(0.01, min(wait, HEARTBEAT)))


def _run_now(world: World) -> None:
    """Everything that needs no time to pass."""
    for _ in range(300):
        worked = False
        for delivery in world.network.deliverable():
            world.network.deliver(delivery)
            worked = True
        for process in world.running:
            while process.pool.work:
                process.pool.run(0)
                worked = True
        ended = [w for w in world.fabric.in_flight if world.fabric.copy_of(w).target in world.fabric.slabs]
        for write in ended:
            world.fabric.complete(write)
        for process in world.running:
            wrote = bool(ended) and isinstance(process.worker, PrefillWorker)
            if wrote or process.wants_step(world.now):
                world.step(process)
                worked = True
        for worker in world.decodes():
            for use in list(worker.running):
                worker.retire(use)
        if not worked:
            return
    raise AssertionError(f"never at rest: {left(world)}")


def left(world: World) -> str:
    parts = [f"in flight: {world.fabric.in_flight}"]
    for process in world.processes.values():
        worker = process.worker
        states = {room: process.manager.state(room) for room in [*worker.uses, *worker.draining]}
        parts.append(f"{process.instance_id}: {states}, due {process.manager.next_deadline()} of {world.now}")
    return "; ".join(parts)


def check_baseline(world: World, rooms: range) -> None:
    """Nothing of any room is left anywhere."""
    for process in world.running:
        worker = process.worker
        worker.allocator.check()
        assert worker.allocator.free == NUM_PAGES, f"{process.instance_id}: {worker.owner}"
        assert not worker.uses
        assert not worker.draining
        assert [process.manager.state(room) for room in rooms] == [None] * len(rooms)
        assert not process.pool.work


def check_that_every_pair_works(world: World) -> None:
    rooms = itertools.count(1000)
    for decode in world.decodes():
        for prefill in world.prefills():
            # One request may find out that a peer was lost.
            assert any(_passes(world, prefill, decode, next(rooms)) for _ in range(_ATTEMPTS)), (
                f"{prefill.name} and {decode.name} don't get together again"
            )


def _passes(world: World, prefill: PrefillWorker, decode: DecodeWorker, room: int) -> bool:
    prefill.open(room, 9, checked=True)
    world.open_at_decode(decode, room, 9, prefill.name.partition("#")[0])
    sending, receiving = prefill.uses[room], decode.uses[room]
    _run_now(world)
    if receiving.agreed and receiving.terminal is None:
        decode.reserve(receiving, 0)
    _run_now(world)
    if sending.has_destination and sending.terminal is None:
        world.compute(prefill, room, num_pages(9))
    run_to_rest(world, within=60)
    return isinstance(sending.terminal, Sent) and isinstance(receiving.terminal, Received)
