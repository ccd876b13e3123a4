"""Workers of both roles in one process, where nothing happens unless it is told to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from prometheus_client import CollectorRegistry

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer.backends.fake import FakeBackend
from diptych.kvtransfer.backends.interface import PageWrite
from diptych.kvtransfer.bootstrap.client import LookupFailed, RouteLookup
from diptych.kvtransfer.bootstrap.route import RankAddress, Route
from diptych.kvtransfer.checksum import PageChecksums
from diptych.kvtransfer.events import Failed
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.parts import TransferParts
from diptych.kvtransfer.probe import DeathProbe, Peer
from diptych.kvtransfer.receiver import DecodeReceiver
from diptych.kvtransfer.sender import PrefillSender
from diptych.kvtransfer.settings import TransferSettings
from diptych.kvtransfer.stats import TransferStats
from diptych.kvtransfer.wire import PROTOCOL_VERSION

from .network import Connection, MemoryNetwork, MemoryPlane
from .told import ToldPool
from .wires import WatchedFabric
from .workers import PAGE_SIZE, DecodeUse, DecodeWorker, PrefillWorker, Use

FINGERPRINT = Fingerprint(
    model="m",
    dtype="float32",
    kv_dtype="float32",
    num_layers=1,
    kv_heads=1,
    head_dim=2,
    page_size=PAGE_SIZE,
    vocab_size=100,
)
NUM_PAGES = 10
PAGE_BYTES = 8
"""One stamp."""
HEARTBEAT = 1.0
STATS = TransferStats(CollectorRegistry(), backend="fake")
"""Shared, for they are slow to make and nobody looks."""

T = TypeVar("T")


def pick(options: Sequence[T], index: int) -> T | None:
    """One of the options, if there is any."""
    return options[index % len(options)] if options else None


def slot_of(host: str) -> str:
    """A worker may be known under several names."""
    return host.rstrip(".")


@dataclass(eq=False)
class Process:
    """One process start."""

    slot: str
    instance_id: str
    identity: Identity
    plane: MemoryPlane
    pool: ToldPool
    worker: PrefillWorker | DecodeWorker
    manager: PrefillSender | DecodeReceiver
    stopped: bool = False

    def step(self) -> None:
        self.pool.finished = False
        self.worker.step()

    def wants_step(self, now: float) -> bool:
        """What wakes a scheduler's loop, but for a write that has ended."""
        deadline = self.manager.next_deadline()
        due = deadline is not None and deadline <= now
        return due or self.plane.has_news or self.pool.finished


class World:
    def __init__(self, *, checksum: bool = False) -> None:
        self.now = 0.0
        self.network = MemoryNetwork(self.clock, HEARTBEAT)
        self.fabric = WatchedFabric(self.clock, settle=HEARTBEAT)
        self.settings = TransferSettings(
            handshake_timeout=5,
            bootstrap_timeout=8,
            receive_timeout=10,
            transfer_timeout=6,
            heartbeat_interval=HEARTBEAT,
            checksum=checksum,
        )
        self.processes: dict[str, Process] = {}
        """Living ones, by slot: `p…` prefill, `d…` decode."""
        self.stamps = itertools.count(1)
        self.computed: dict[int, tuple[int, list[int]]] = {}
        """By first stamp: the room and the stamps of all pages of each prompt that prefill has computed."""
        self.fingerprint_of_routes = FINGERPRINT
        self.names: list[str] = []
        """Of every process start."""
        self.asked: dict[int, set[str]] = {}
        """Every decode process start that a room was ever opened on."""
        self._troubled: set[frozenset[str]] = set()
        """Process starts, and pairs of them, to which something has happened."""
        self._starts = itertools.count(1)

    def clock(self) -> float:
        return self.now

    # ---- processes ----------------------------------------------------------------------------------

    def start(self, slot: str) -> None:
        """On the slot's address."""
        number = next(self._starts)
        instance_id = f"{slot}#{number}"
        identity = Identity(instance_id=instance_id, boot_id="", pid_namespace="", pid=number, start_ticks=0)
        slab = torch.zeros(NUM_PAGES, 1, dtype=torch.int64)
        plane = MemoryPlane(self.network, instance_id, f"tcp://memory:{slot}")
        pool = ToldPool()
        parts = TransferParts(
            backend=FakeBackend(slab, page_bytes=PAGE_BYTES, agent=instance_id, fabric=self.fabric),
            checksums=PageChecksums(slab, page_bytes=PAGE_BYTES),
            control=plane,
            fingerprint=FINGERPRINT,
            identity=identity,
            settings=self.settings,
            stats=STATS,
            background=pool,
            lookup=RouteLookup(pool, self._fetch),
            probe=DeathProbe(pool, self._prove),
            clock=self.clock,
        )
        worker: PrefillWorker | DecodeWorker
        manager: PrefillSender | DecodeReceiver
        if slot.startswith("p"):
            manager = PrefillSender(parts)
            worker = PrefillWorker(instance_id, slab, manager)
        else:
            manager = DecodeReceiver(parts)
            worker = DecodeWorker(instance_id, slab, manager)
        self.names.append(instance_id)
        self.fabric.workers[instance_id] = worker
        self.processes[slot] = Process(slot, instance_id, identity, plane, pool, worker, manager)

    def kill(self, slot: str, *, keeps: bool) -> None:
        process = self.processes.pop(slot)
        self.trouble(process.instance_id)
        self.network.kill(process.plane, keeps=keeps)
        self.fabric.kill(process.instance_id)

    def stop(self, process: Process) -> None:
        process.stopped = True
        self.trouble(process.instance_id)
        process.plane.stopped_at = self.now
        self.fabric.stop(process.instance_id)

    def go_on(self, process: Process) -> None:
        process.stopped = False
        process.plane.stopped_at = None
        self.fabric.go_on(process.instance_id)

    def _fetch(self, host: str, port: int) -> Route:
        process = self.processes.get(slot_of(host))
        if process is None:
            raise LookupFailed("not registered", retry=True)
        if process.stopped:
            raise LookupFailed("can't be reached", retry=False)
        address = RankAddress(rank=0, identity=process.identity, control_address=process.plane.address)
        return Route(
            version=PROTOCOL_VERSION,
            worker_id=process.instance_id,
            fingerprint=self.fingerprint_of_routes,
            backend="fake",
            ranks=[address],
        )

    def _prove(self, peer: Peer) -> str | None:
        alive = any(p.instance_id == peer.instance_id for p in self.processes.values())
        return None if alive else "its process has ended"

    @property
    def running(self) -> list[Process]:
        return [process for process in self.processes.values() if not process.stopped]

    def prefills(self) -> list[PrefillWorker]:
        return [p.worker for p in self.running if isinstance(p.worker, PrefillWorker)]

    def decodes(self) -> list[DecodeWorker]:
        return [p.worker for p in self.running if isinstance(p.worker, DecodeWorker)]

    # ---- trouble ------------------------------------------------------------------------------------

    def trouble(self, *who: str) -> None:
        """Something has happened to that process start, or between these two."""
        self._troubled.add(frozenset(who))

    def cut(self, connection: Connection, *, keeps: bool, noticed: bool) -> None:
        self.trouble(connection.owner.instance_id, connection.target)
        self.network.cut(connection, keeps=keeps)
        connection.noticed = noticed

    def fail(self, write: PageWrite) -> None:
        copy = self.fabric.copy_of(write)
        self.trouble(copy.origin, copy.target)
        self.fabric.fail(write, "cable cut")

    def _trouble_between(self, one: str, other: str) -> bool:
        return not self._troubled.isdisjoint(map(frozenset, ({one}, {other}, {one, other})))

    # ---- what happens -------------------------------------------------------------------------------

    def open_at_decode(self, worker: DecodeWorker, room: int, num_tokens: int, prefill: str) -> None:
        self.asked.setdefault(room, set()).add(worker.name)
        worker.open(room, num_tokens, prefill)

    def compute(self, worker: PrefillWorker, room: int, n: int) -> None:
        """The next pages of a prompt, and its end when they were the last."""
        use = worker.uses[room]
        first = next(self.stamps)
        for _ in range(n - 1):
            next(self.stamps)
        worker.send(use, n, first)
        if use.num_sent == len(use.pages):
            self.computed[use.stamps[0]] = (room, list(use.stamps))
            worker.finish(use)

    def step(self, process: Process) -> None:
        process.step()
        self.check()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.network.tick()

    def check(self) -> None:
        """What must hold at any time."""
        self.fabric.watch()
        for process in self.processes.values():
            worker = process.worker
            assert len(worker.owner) == worker.allocator.held + worker.allocator.quarantined
            for use, event in worker.failed:
                self._check_blame(use, event)
            worker.failed.clear()
            if isinstance(worker, DecodeWorker):
                self._check_received(worker)

    def _check_received(self, worker: DecodeWorker) -> None:
        for use in worker.received:
            first = worker.first_tokens.pop(use)
            assert first is not None
            room, stamps = self.computed[first]
            assert room == use.room, f"{use} got room {room}"
            assert worker.stamps(use.pages) == stamps[use.first_page_index :]
        worker.received.clear()

    def _check_blame(self, use: Use, event: Failed) -> None:
        """A room is only lost with a peer to which something has happened."""
        if event.status not in (502, 503):
            return
        here = use.worker.name
        if isinstance(use, DecodeUse):
            peers = {name for name in self.names if name.startswith(f"{slot_of(use.prefill)}#")}
        else:
            peers = self.asked.get(use.room, set())
        assert any(self._trouble_between(here, peer) for peer in peers), (
            f"{use} failed for no reason: {event}"
        )
