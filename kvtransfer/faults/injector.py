"""Decides which fault happens when, and keeps what is held back. The wrappers beside it do the rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from diptych.engine.faults import (
    Action,
    FaultChange,
    FaultControl,
    FaultReport,
    FaultRule,
    Gate,
    HeldReport,
    RuleReport,
    Where,
)
from diptych.kvtransfer.stats import TransferStats

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Held:
    """Something that is kept from happening."""

    where: Where
    action: Action
    kind: str | None
    room: int | None
    peer: str
    go: Callable[[], None]
    """Lets it happen; called once, with the item already forgotten."""
    since: float
    due: float | None
    """When it goes by itself, on the injector's clock; None waits for the release."""


@dataclass(slots=True)
class _Rule:
    rule: FaultRule
    matched: int = 0
    fired: int = 0


class Injector(FaultControl):
    """One per worker process, shared by its wrappers. The same seed, rules and sequence of opportunities give
    the same decisions."""

    def __init__(
        self,
        stats: TransferStats,
        *,
        seed: int = 0,
        rules: Sequence[FaultRule] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.random = Random(seed)
        self.destinations: dict[tuple[str, int], int] = {}
        """(peer, its page) → the room whose reservation named it last: writes are known by their pages."""
        self._stats = stats
        self._seed = seed
        self._rules = [_Rule(rule) for rule in rules]
        self._held: list[Held] = []
        self._granted: set[Gate] = set()

    def decide(self, where: Where, kind: str | None = None, room: int | None = None) -> FaultRule | None:
        """The fault for this opportunity, counted; None lets it pass."""
        for entry in self._rules:
            rule = entry.rule
            if rule.where != where or rule.kind not in (None, kind) or rule.room not in (None, room):
                continue
            entry.matched += 1
            if entry.matched <= rule.skip or (rule.count is not None and entry.fired >= rule.count):
                continue
            if rule.probability < 1 and self.random.random() >= rule.probability:
                continue
            entry.fired += 1
            self._stats.fault_injected(where, rule.action)
            what = "" if room is None else f" of room {room}"
            logger.warning("injected fault: %s %s%s at %s", rule.action, kind or where, what, where)
            return rule
        return None

    # ---- what is held ---------------------------------------------------------------------------------

    def hold(
        self,
        rule: FaultRule,
        go: Callable[[], None],
        *,
        kind: str | None = None,
        room: int | None = None,
        peer: str = "",
    ) -> Held:
        now = self.clock()
        due = None if rule.seconds is None else now + rule.seconds
        held = Held(rule.where, rule.action, kind, room, peer, go, now, due)
        self._held.append(held)
        return held

    def forget(self, held: Held) -> None:
        """It never happens. No effect when it has."""
        if held in self._held:
            self._held.remove(held)

    def overtaken(self, where: Where, peer: str) -> None:
        """A message to or from `peer` has passed: those that wait to come after it go now."""
        for held in list(self._held):
            if held.action == "reorder" and held.where == where and held.peer == peer:
                self._go(held)

    def holds(self, where: Where, peer: str) -> bool:
        return any(held.where == where and held.peer == peer for held in self._held)

    def run_due(self) -> None:
        """Let go of what was delayed long enough, earliest first."""
        now = self.clock()
        due = [(held.due, held) for held in self._held if held.due is not None and held.due <= now]
        for _, held in sorted(due, key=lambda entry: entry[0]):
            self._go(held)

    def next_deadline(self) -> float | None:
        """When `run_due` has work; None for never."""
        return min((held.due for held in self._held if held.due is not None), default=None)

    def _go(self, held: Held) -> None:
        if held in self._held:
            self._held.remove(held)
            held.go()

    # ---- for the scheduler ----------------------------------------------------------------------------

    def may(self, gate: Gate) -> bool:
        if gate in self._granted:
            # Asked and judged before it was held: this one step passes.
            self._granted.remove(gate)
            return True
        if self.holds(gate, ""):
            return False
        rule = self.decide(gate)
        if rule is None:
            return True
        self.hold(rule, lambda: self._granted.add(gate))
        return False

    def change(self, change: FaultChange) -> None:
        if change.seed is not None:
            self._seed = change.seed
        if change.rules is not None:
            self._rules = [_Rule(rule) for rule in change.rules]
        if change.rules is not None or change.seed is not None:
            self.random.seed(self._seed)
        if change.release:
            for held in list(self._held):
                self._go(held)

    def report(self) -> FaultReport:
        now = self.clock()
        return FaultReport(
            seed=self._seed,
            rules=[RuleReport(rule=e.rule, matched=e.matched, fired=e.fired) for e in self._rules],
            held=[
                HeldReport(where=h.where, action=h.action, kind=h.kind, room=h.room, seconds=now - h.since)
                for h in self._held
            ],
        )
