"""A fabric that knows whose page each write touches, and may let the bytes of a failed one land late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diptych.kvtransfer.backends.fake import FakeFabric
from diptych.kvtransfer.backends.interface import PageWrite

from .workers import Use, Worker


@dataclass(eq=False)
class Tagged:
    """A write, and who owned its pages when it was posted."""

    write: PageWrite
    source: Use
    target: Use | None
    """None when the worker at the other end was gone already."""
    lands_until: float | None = None
    """Set once it has failed: when its last byte has landed or never will."""


class WatchedFabric(FakeFabric):
    """All writes stall. `settle`: seconds for which a failed write's bytes may still sit in a socket buffer
    of a receiver that runs."""

    def __init__(self, clock: Callable[[], float], settle: float) -> None:
        super().__init__()
        self.stalled = True
        self.workers: dict[str, Worker] = {}
        """Living ones, by agent."""
        self.stopped: set[str] = set()
        self.late: list[Tagged] = []
        self._clock = clock
        self._settle = settle
        self._tagged: dict[int, Tagged] = {}

    def watch(self) -> None:
        """Every write, under way or late, touches only pages of the requests it was posted for."""
        for write in self.in_flight:
            tagged = self._tagged.get(id(write))
            if tagged is None:
                self._tagged[id(write)] = self._tag(write)
            else:
                self._check(tagged)
        now = self._clock()
        self.late = [tagged for tagged in self.late if self._may_land(tagged, now)]
        for tagged in self.late:
            self._check(tagged)

    def _tag(self, write: PageWrite) -> Tagged:
        copy = self.copy_of(write)
        sources = {self.workers[copy.origin].owner.get(page) for page in copy.src_pages}
        assert len(sources) == 1, f"a write reads pages of {sources}"
        source = sources.pop()
        assert source is not None, f"a write reads free pages {copy.src_pages} of {copy.origin}"
        target = None
        if copy.target in self.workers:
            targets = {self.workers[copy.target].owner.get(page) for page in copy.dst_pages}
            assert len(targets) == 1, f"a write touches pages of {targets}"
            target = targets.pop()
            assert target is not None, f"a write touches free pages {copy.dst_pages} of {copy.target}"
            assert target.room == source.room
            assert target.num_tokens == source.num_tokens, "a write for a request that doesn't match"
        return Tagged(write, source, target)

    def _check(self, tagged: Tagged) -> None:
        copy = self.copy_of(tagged.write)
        if tagged.lands_until is None and copy.origin in self.workers:
            owner = self.workers[copy.origin].owner
            for page in copy.src_pages:
                assert owner.get(page) is tagged.source, f"{tagged}: source page {page} was given away"
        if copy.target in self.workers:
            owner = self.workers[copy.target].owner
            for page in copy.dst_pages:
                assert owner.get(page) is tagged.target, f"{tagged}: page {page} was given away"

    def _may_land(self, tagged: Tagged, now: float) -> bool:
        target = self.copy_of(tagged.write).target
        assert tagged.lands_until is not None
        return target in self.workers and (target in self.stopped or now < tagged.lands_until)

    def fail(self, write: PageWrite, error: str) -> None:
        super().fail(write, error)
        self._linger(write)

    def _linger(self, write: PageWrite) -> None:
        tagged = self._tagged.pop(id(write), None)
        if tagged is not None and tagged.target is not None:
            tagged.lands_until = self._clock() + self._settle
            self.late.append(tagged)

    def complete(self, write: PageWrite) -> None:
        super().complete(write)
        self._tagged.pop(id(write), None)

    def land_late(self, tagged: Tagged) -> None:
        """Bytes of a failed write arrive after all."""
        self.late.remove(tagged)
        self.land(tagged.write)

    def stop(self, agent: str) -> None:
        """What sits in its socket buffers by now is not to be relied on: it lands, or never does."""
        self.late = [tagged for tagged in self.late if self.copy_of(tagged.write).target != agent]
        self.stopped.add(agent)

    def go_on(self, agent: str) -> None:
        self.stopped.discard(agent)
        for tagged in self.late:
            if self.copy_of(tagged.write).target == agent:
                tagged.lands_until = self._clock() + self._settle

    def kill(self, agent: str) -> None:
        """Its own writes end with it, but for what is in socket buffers; those towards it hang."""
        for write in [w for w in self.in_flight if self.copy_of(w).origin == agent]:
            self.in_flight.remove(write)
            self._linger(write)
        self.late = [tagged for tagged in self.late if self.copy_of(tagged.write).target != agent]
        self.slabs.pop(agent, None)
        self.workers.pop(agent)
        self.stopped.discard(agent)
