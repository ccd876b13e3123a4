"""What a soak does, drawn from its seed: requests, faults, and what happens to workers.

How the draws fall together in time depends on the machine; the draws themselves don't."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Rule = dict[str, Any]
Ending = Literal["stay", "abort", "leave"]
Side = Literal["prefill", "decode"]

MAX_PROMPT_TOKENS = 300
MAX_OUTPUT_TOKENS = 48
NUM_PROMPTS = 48


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds; what the workers and the router are launched with."""

    heartbeat: float = 1.0
    connect: float = 2.0
    handshake: float = 4.0
    bootstrap: float = 5.0
    receive: float = 6.0
    transfer: float = 3.0
    retracted: float = 10.0
    shutdown: float = 3.0
    retries: int = 1

    @property
    def attempt(self) -> float:
        """Before a request's first token."""
        return self.connect + self.handshake + self.bootstrap + self.receive + 2 * self.heartbeat

    @property
    def request(self) -> float:
        """No request may take longer. Generating itself has no deadline: 48 tokens, and steps that are
        delayed on purpose."""
        return (1 + self.retries) * self.attempt + self.retracted + 15.0


@dataclass(frozen=True, slots=True)
class RequestPlan:
    prompt: int
    """Index into the prompt set."""
    max_tokens: int
    samples: int
    stream: bool
    ending: Ending
    patience: float
    """Seconds after which it is aborted or its client leaves; for `stay` nothing."""


@dataclass(frozen=True, slots=True)
class Blow:
    """Something that happens to a worker in mid-traffic."""

    side: Side
    kind: Literal["kill", "kill scheduler", "stop", "restart"]
    """`stop`: SIGSTOP of the scheduler, then SIGCONT. `restart`: SIGTERM. Whatever dies is started again."""
    after: float
    seconds: float
    """Of a `stop`."""


def prompt_set(seed: int) -> list[list[int]]:
    """Token ids; about half of the prompts begin like others."""
    random = Random(f"{seed}: prompts")
    # Only ordinary tokens: what comes back is compared as ids, never as text.
    stems = [[random.randrange(100, 40000) for _ in range(random.randrange(8, 200))] for _ in range(6)]
    prompts = []
    for i in range(NUM_PROMPTS):
        length = random.choice((random.randrange(1, 40), random.randrange(1, MAX_PROMPT_TOKENS)))
        stem = random.choice(stems) if i % 2 else []
        rest = max(1, length - len(stem))
        prompts.append(stem + [random.randrange(100, 40000) for _ in range(rest)])
    return prompts


def draw_request(random: Random, *, quiet: bool = False) -> RequestPlan:
    """`quiet`: one that must be answered in full."""
    ending: Ending = "stay" if quiet else random.choices(("stay", "abort", "leave"), (6, 1, 1))[0]
    return RequestPlan(
        prompt=random.randrange(NUM_PROMPTS),
        max_tokens=random.randrange(1, MAX_OUTPUT_TOKENS + 1),
        samples=random.choice((1, 1, 1, 1, 1, 2, 3)),
        stream=random.random() < 0.5,
        ending=ending,
        patience=min(random.expovariate(4.0), 4.0),
    )


_MESSAGES = {
    "prefill": ("welcome", "refused", "complete", "abort", "drained", None),
    "decode": ("hello", "reserve", "verified", "abort", None),
}
"""What each side sends; None is any."""


def draw_faults(random: Random, side: Side, *, checksum: bool, heartbeat: float) -> list[Rule]:
    """Up to four rules. `checksum`: decode compares pages, so that they may be damaged."""
    return [_draw_fault(random, side, checksum, heartbeat) for _ in range(random.randrange(5))]


def _draw_fault(random: Random, side: Side, checksum: bool, heartbeat: float) -> Rule:
    rarely = {"probability": round(random.uniform(0.02, 0.2), 3)}
    often = {"probability": round(random.uniform(0.1, 0.5), 3)}
    few = {"count": random.randrange(1, 4), "skip": random.randrange(0, 6)}
    moment = round(random.uniform(0.01, 1.0), 3)
    message: Rule = {"where": random.choice(("send", "receive"))}
    if (kind := random.choice(_MESSAGES[side])) is not None and message["where"] == "send":
        message["kind"] = kind
    rules: list[Rule] = [
        {**message, "action": "drop", **rarely},
        {**message, "action": "delay", "seconds": moment, **often},
        {**message, "action": "duplicate", **often},
        {**message, "action": "reorder", "seconds": moment, **often},
        {**message, "action": "hold", **few},
        {**message, "where": "send", "action": "corrupt", **rarely},
        {**message, "where": "send", "action": "corrupt", "how": "oversize", **few},
        {"where": "compute", "action": "delay", "seconds": moment / 5, **rarely},
    ]
    if side == "prefill":
        # Late bytes must land while decode's pages are in quarantine: that is what is promised.
        late = round(random.uniform(0.0, 0.4) * heartbeat, 3)
        rules += [
            {"where": "write", "action": "fail", **few},
            {"where": "write", "action": "fail_late", "seconds": late, **few},
            {"where": "write", "action": "stall", **few},
            {"where": "write", "action": "delay", "seconds": moment, **often},
            {"where": "admit", "action": "delay", "seconds": moment, **rarely},
        ]
        rules += [{"where": "write", "action": "corrupt", **rarely}] if checksum else []
    else:
        rules += [
            {"where": "lookup", "action": random.choice(("drop", "hold")), **few},
            {"where": "lookup", "action": "delay", "seconds": moment, **often},
            {"where": "preallocate", "action": "delay", "seconds": moment, **rarely},
            {"where": "resume", "action": "delay", "seconds": moment, **often},
        ]
    return random.choice(rules)


def draw_blow(random: Random, seconds: float) -> Blow:
    """Something to happen within the next `seconds`."""
    return Blow(
        side=random.choice(("prefill", "decode")),
        kind=random.choices(("kill", "kill scheduler", "stop", "restart"), (3, 3, 3, 1))[0],
        after=random.uniform(0.2, 0.7) * seconds,
        seconds=random.uniform(0.2, 4.0),
    )
