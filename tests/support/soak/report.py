"""What a soak has seen, and how it reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from support.soak.traffic import Outcome


@dataclass(slots=True)
class Report:
    backend: str
    seed: int
    seconds: float = 0.0
    cycles: int = 0
    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Of failed requests."""
    blows: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    """Retractions, and faults that fired by where and action; a killed worker's until the last look."""
    tokens: int = 0
    worst_finished: float = 0.0
    worst_failed: float = 0.0
    growth: list[str] = field(default_factory=list)
    """What the last processes hold more than at their first rest."""
    violations: list[str] = field(default_factory=list)
    last_faults: list[str] = field(default_factory=list)

    def violated(self, what: str) -> None:
        self.violations.append(f"cycle {self.cycles}: {what}")

    def count(self, outcome: Outcome) -> None:
        self.outcomes[outcome.kind] += 1
        if outcome.kind == "failed":
            self.reasons[outcome.reason] += 1
            self.worst_failed = max(self.worst_failed, outcome.seconds)
        elif outcome.kind == "finished":
            self.tokens += outcome.plan.max_tokens * outcome.plan.samples
            self.worst_finished = max(self.worst_finished, outcome.seconds)
        for problem in outcome.wrong:
            self.violated(problem)

    def text(self) -> str:
        faults = sorted((event, n) for event, n in self.events.items() if event != "retractions")
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.outcomes.items()))
        blows = ", ".join(f"{n} × {blow}" for blow, n in sorted(self.blows.items())) or "none"
        lines = [
            f"soak over {self.backend}, seed {self.seed}: {self.seconds:.0f} s, {self.cycles} cycles",
            f"  requests: {self.sent} sent = {kinds}; {self.tokens} tokens compared, "
            f"{self.events['retractions']} retractions",
            f"  worst latency: {self.worst_finished:.1f} s finished, {self.worst_failed:.1f} s failed",
            f"  workers: {blows}",
            f"  faults fired: {sum(n for _, n in faults)}",
            *(f"    {n:6d} {fault}" for fault, n in faults),
            "  failures:",
            *(f"    {n:6d} {reason}" for reason, n in self.reasons.most_common()),
            "  held more than at first rest:",
            *(f"    {line}" for line in self.growth),
        ]
        if self.violations:
            lines += [f"  VIOLATIONS (repeat with SEED={self.seed} BACKEND={self.backend}):"]
            lines += [f"    {violation}" for violation in self.violations[:40]]
            lines += ["  faults in force at the first:", *(f"    {rule}" for rule in self.last_faults)]
        else:
            lines.append("  no violation")
        return "\n".join(lines)
