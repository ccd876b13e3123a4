"""What fault injection can be asked to do and what it answers, and the one question a scheduler asks it. The
faults themselves are injected by `kvtransfer/faults/`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

Where = Literal["send", "receive", "write", "lookup", "admit", "compute", "preallocate", "resume"]
Action = Literal["drop", "delay", "duplicate", "reorder", "hold", "corrupt", "fail", "fail_late", "stall"]
MessageKind = Literal["hello", "welcome", "refused", "reserve", "complete", "verified", "abort", "drained"]
Gate = Literal["admit", "compute", "preallocate", "resume"]
Corruption = Literal["noise", "truncate", "version", "oversize"]

ACTIONS: Mapping[Where, tuple[Action, ...]] = {
    "send": ("drop", "delay", "duplicate", "reorder", "hold", "corrupt"),
    "receive": ("drop", "delay", "duplicate", "reorder", "hold"),
    "write": ("fail", "fail_late", "stall", "delay", "corrupt"),
    "lookup": ("drop", "delay", "hold"),
    "admit": ("delay", "hold"),
    "compute": ("delay", "hold"),
    "preallocate": ("delay", "hold"),
    "resume": ("delay", "hold"),
}
"""What can be done where."""

TIMED: frozenset[Action] = frozenset({"delay", "reorder", "fail_late"})
"""Actions that `seconds` means something to."""


class FaultRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One kind of fault. Of several rules that match, the first that fires decides."""

    where: Where
    """`send`, `receive`: a control message. `write`: one batch of page copies (prefill). `lookup`: a
    request's question to the bootstrap service (decode). The others are gates before a step of the scheduler:
    `admit` (prefill: waiting prompts into compute), `compute` (prefill: a step of chunks; decode: a step of
    the batch), `preallocate` (decode: pages for one prompt), `resume` (decode: parked requests)."""
    action: Action
    kind: MessageKind | None = None
    """Of the control message; None is any."""
    room: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """None is any. Gates and look-ups know no rooms, nor do `hello`, `welcome` and `refused`."""
    probability: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    count: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)] | None = None
    """Most times it fires; None is no limit."""
    skip: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    """The first so many matches pass."""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=86400)] | None = None
    """`delay`: how long. `reorder`: how long to wait for a message to be overtaken by, at most. `fail_late`:
    after how long the bytes land. For the latter two None is until the release."""
    how: Corruption | None = None
    """What `corrupt` does to a message; None draws one of the first three."""

    def problem(self) -> tuple[str, str] | None:
        """(field, what is wrong with it) when the fields don't go together."""
        message = self.where in ("send", "receive")
        if self.action not in ACTIONS[self.where]:
            return (
                "action",
                f"{self.action} can't be done at {self.where}: {', '.join(ACTIONS[self.where])} can",
            )
        if self.kind is not None and not message:
            return "kind", f"only messages have a kind, not {self.where}"
        if self.room is not None and not message and self.where != "write":
            return "room", f"{self.where} is not about one room"
        if self.action == "delay" and self.seconds is None:
            return "seconds", "delay needs seconds"
        if self.seconds is not None and self.action not in TIMED:
            return "seconds", f"{self.action} takes no time; {', '.join(sorted(TIMED))} do"
        if self.how is not None and (self.action, self.where) != ("corrupt", "send"):
            return "how", "only for corrupt at send"
        return None


class FaultChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /faults`: new rules come first, then the release."""

    rules: list[FaultRule] | None = None
    """Replace all; counting and the random numbers begin anew. What is held stays held."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """Of the random numbers, from now on; they begin anew."""
    release: bool = False
    """Let go of everything that is held, stalled or delayed."""

    def problem(self) -> tuple[str, str] | None:
        """(path of the field, what is wrong) of the first rule whose fields don't go together."""
        for i, rule in enumerate(self.rules or ()):
            if (found := rule.problem()) is not None:
                return f"rules[{i}].{found[0]}", found[1]
        return None


class RuleReport(msgspec.Struct, frozen=True, kw_only=True):
    rule: FaultRule
    matched: int
    """Opportunities, those skipped included."""
    fired: int


class HeldReport(msgspec.Struct, frozen=True, kw_only=True):
    """A message, write, look-up or step that is kept from happening now."""

    where: Where
    action: Action
    kind: str | None
    room: int | None
    seconds: float
    """Since when."""


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /faults`."""

    seed: int
    rules: list[RuleReport]
    held: list[HeldReport]


class FaultControl(ABC):
    """A scheduler's view of its injector. Called from the scheduler's thread; nothing blocks."""

    @abstractmethod
    def may(self, gate: Gate) -> bool:
        """Whether the step may happen now; ask only when there is one to take. What wakes the loop when a
        refusal ends is the transfer's next deadline, or the message that releases it."""

    @abstractmethod
    def change(self, change: FaultChange) -> None: ...

    @abstractmethod
    def report(self) -> FaultReport: ...
