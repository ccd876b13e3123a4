"""Any interleaving of messages, failures, restarts and deadlines: each room ends exactly once at each side
that lives, no page is given away while a write may touch it, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from .settle import check_baseline, check_that_every_pair_works, heal, run_to_rest
from .world import World, pick

ROOMS = range(1, 4)
INDEX = st.integers(0, 11)
MAYBE = st.booleans()
LEGS = st.sampled_from(["pd", "dp", "p", "d", "pp"])


def tokens_of(room: int) -> int:
    """1 to 4 pages, the last one partial."""
    return 4 * room - 1


class Interleavings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.slots: list[str] = []
        self.failed = False

    def act(self, action: Callable[[], object]) -> None:
        self.failed = True
        action()
        self.world.check()
        self.failed = False

    @initialize(num_prefill=st.integers(1, 2), num_decode=st.integers(1, 2), checksum=MAYBE)
    def launch(self, num_prefill: int, num_decode: int, checksum: bool) -> None:
        self.world = World(checksum=checksum)
        self.slots = [f"p{i}" for i in range(num_prefill)] + [f"d{i}" for i in range(num_decode)]
        for slot in self.slots:
            self.world.start(slot)

    # ---- requests -----------------------------------------------------------------------------------

    @rule(room=st.sampled_from(ROOMS), prefill=INDEX, decode=INDEX, legs=LEGS, odd=INDEX)
    def request(self, room: int, prefill: int, decode: int, legs: str, odd: int) -> None:
        """A router sends a request to both sides, in either order; a confused client may reach but one."""
        for leg in legs:
            if leg == "p":
                self.act(lambda: self.prefill_leg(prefill, room, odd))
            else:
                self.act(lambda: self.decode_leg(decode, room, prefill))

    @rule(room=st.sampled_from(ROOMS), prefill=INDEX, decode=INDEX, pages=st.integers(0, 4))
    def request_under_way(self, room: int, prefill: int, decode: int, pages: int) -> None:
        """A request gets as far as it can, with so many of its pages computed and none arrived."""
        self.act(lambda: self.decode_leg(decode, room, prefill))
        self.act(lambda: self.prefill_leg(prefill, room, odd=2))
        self.run(3)
        self.reserve(decode, 0)
        self.run(1)
        for worker in self.world.prefills():
            use = worker.uses.get(room)
            if pages and use is not None and use.has_destination and not use.finished:
                self.act(lambda worker=worker: self.world.compute(worker, room, pages))

    def prefill_leg(self, index: int, room: int, odd: int) -> None:
        """`odd` 0: not the request that decode got."""
        worker = pick(self.world.prefills(), index)
        if worker is not None:
            worker.open(room, tokens_of(room) + 4 * (odd == 0), checked=odd % 2 == 0)

    def decode_leg(self, index: int, room: int, prefill: int) -> None:
        worker = pick(self.world.decodes(), index)
        slot = pick([slot for slot in self.slots if slot.startswith("p")], prefill)
        if worker is not None and slot is not None:
            name = slot + "." * (prefill % 3 == 2)
            self.world.open_at_decode(worker, room, tokens_of(room), name)

    @rule(index=INDEX, have=st.sampled_from([0, 0, 0, 1, 2]))
    def reserve(self, index: int, have: int) -> None:
        ready = [(w, use) for w in self.world.decodes() for use in w.uses.values() if w.can_reserve(use)]
        found = pick(ready, index)
        if found is not None:
            worker, use = found
            self.act(lambda: worker.reserve(use, have))

    @rule(index=INDEX, n=st.integers(1, 4), early=MAYBE)
    def compute(self, index: int, n: int, early: bool) -> None:
        """`early`: before the destination is known, too."""
        open_ones = [
            (worker, use)
            for worker in self.world.prefills()
            for use in worker.uses.values()
            if not use.finished and (use.has_destination or (early and use.checked))
        ]
        found = pick(open_ones, index)
        if found is not None:
            worker, use = found
            self.act(lambda: self.world.compute(worker, use.room, n))

    @rule(index=INDEX)
    def recall(self, index: int) -> None:
        uses = [(w, u) for w in self.world.prefills() for u in w.uses.values() if not u.has_destination]
        found = pick(uses, index)
        if found is not None:
            worker, use = found
            if worker.sender.state(use.room) is not None:
                self.act(lambda: worker.recall(use))

    @rule(index=INDEX, at_prefill=MAYBE)
    def abort(self, index: int, at_prefill: bool) -> None:
        if at_prefill:
            senders = [(w.sender, room) for w in self.world.prefills() for room in w.uses]
            found = pick(senders, index)
        else:
            receivers = [(w.receiver, room) for w in self.world.decodes() for room in w.uses]
            found = pick(receivers, index)
        if found is not None:
            manager, room = found
            self.act(lambda: manager.abort(room, "the client left"))

    # ---- progress -----------------------------------------------------------------------------------

    @rule(index=INDEX)
    def deliver(self, index: int) -> None:
        delivery = pick(self.world.network.deliverable(), index)
        if delivery is not None:
            self.act(lambda: self.world.network.deliver(delivery))

    @rule(index=INDEX)
    def step(self, index: int) -> None:
        process = pick(self.world.running, index)
        if process is not None:
            self.act(process.step)

    @rule(index=INDEX, which=INDEX)
    def work(self, index: int, which: int) -> None:
        """A look-up or a probe ends."""
        process = pick([process for process in self.world.running if process.pool.work], index)
        if process is not None:
            self.act(lambda: process.pool.run(which % len(process.pool.work)))

    @rule(turns=st.integers(1, 4))
    def run(self, turns: int) -> None:
        """All messages arrive, all loops turn; writes still take their time."""
        for _ in range(turns):
            for delivery in self.world.network.deliverable():
                self.act(lambda delivery=delivery: self.world.network.deliver(delivery))
            for process in self.world.running:
                while process.pool.work:
                    self.act(lambda process=process: process.pool.run(0))
                self.act(process.step)
        if turns > 1:
            for worker in self.world.decodes():
                for use in list(worker.running):
                    self.act(lambda worker=worker, use=use: worker.retire(use))

    @rule(index=INDEX, all_of_them=MAYBE)
    def complete(self, index: int, all_of_them: bool) -> None:
        write = pick(self.world.fabric.in_flight, index)
        writes = list(self.world.fabric.in_flight) if all_of_them else [write] if write is not None else []
        for write in writes:
            self.act(lambda write=write: self.world.fabric.complete(write))

    @rule(seconds=st.sampled_from([0.2, 1.0, 2.5, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.act(lambda: self.world.advance(seconds))

    # ---- trouble ------------------------------------------------------------------------------------

    @rule(index=INDEX)
    def fail(self, index: int) -> None:
        write = pick(self.world.fabric.in_flight, index)
        if write is not None:
            self.act(lambda: self.world.fail(write))

    @rule(index=INDEX)
    def land_late(self, index: int) -> None:
        """Bytes of a write that failed arrive after all."""
        self.world.check()
        late = [t for t in self.world.fabric.late if t.target is not None]
        tagged = pick(late, index)
        if tagged is not None:
            self.act(lambda: self.world.fabric.land_late(tagged))

    @rule(index=INDEX, keeps=MAYBE, noticed=MAYBE)
    def cut(self, index: int, keeps: bool, noticed: bool) -> None:
        connections = [c for c in self.world.network.connections if c.usable]
        connection = pick(connections, index)
        if connection is not None:
            self.act(lambda: self.world.cut(connection, keeps=keeps, noticed=noticed))

    @rule(index=INDEX, keeps=MAYBE, restart=MAYBE)
    def kill(self, index: int, keeps: bool, restart: bool) -> None:
        slot = pick(sorted(self.world.processes), index)
        if slot is not None:
            self.act(lambda: self.world.kill(slot, keeps=keeps))
            if restart:
                self.act(lambda: self.world.start(slot))

    @rule(index=INDEX)
    def stop(self, index: int) -> None:
        process = pick(self.world.running, index)
        if process is not None:
            self.act(lambda: self.world.stop(process))

    @precondition(lambda self: len(self.world.running) < len(self.slots))
    @rule(index=INDEX)
    def recover(self, index: int) -> None:
        """A worker that is down starts, one that was stopped goes on."""
        slot = pick([s for s in self.slots if s not in {p.slot for p in self.world.running}], index)
        process = self.world.processes.get(slot) if slot is not None else None
        if process is not None:
            self.act(lambda: self.world.go_on(process))
        elif slot is not None:
            self.act(lambda: self.world.start(slot))

    def teardown(self) -> None:
        if self.failed or not self.slots:
            return
        heal(self.world, self.slots)
        run_to_rest(self.world, within=60)
        check_baseline(self.world, ROOMS)
        check_that_every_pair_works(self.world)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=300,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
