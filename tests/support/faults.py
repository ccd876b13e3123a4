"""Faults in a running worker, without sleeps: inject, wait until it has happened, do the damage, let go."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from support.client import Client

Rule = dict[str, Any]


class Faults:
    """`/faults` of one worker that was launched with `--enable-fault-injection`.

        prefill.faults.hold("complete")               # messages of that kind, from now on
        answer = pool.submit(client.ok, "/generate", body)
        (held,) = prefill.faults.wait_held(1)         # {"where", "action", "kind", "room", "seconds"}
        …                                             # decode is RECEIVING for as long as you like
        prefill.faults.release()                      # nothing is held or injected any more
        answer.result()

    What keeps a request in which state (P: on the prefill worker, D: on the decode worker):

    | state | by |
    |---|---|
    | SenderState.AWAITING_DESTINATION | D `hold("reserve")`; prefill computes ahead meanwhile |
    | PrefillState.BOOTSTRAPPING | the same, and P `gate("admit")` or `--max-optimistic-fraction 0` |
    | PrefillState.WAITING, SenderState.READY | P `gate("admit")`, once decode has reserved |
    | PrefillState.FORWARDING | P `gate("compute", skip=n)`: after n steps of chunks |
    | SenderState.SENDING | P `gate("compute", skip=1)`, prompt over a chunk; `stall()` for writes in flight |
    | PrefillState.TRANSFERRING, SenderState.FINISHING | P `stall()` |
    | SenderState.CONFIRMING | D `hold("verified")`, with `--enable-kv-checksum` |
    | SenderState.DRAINING | P `stall()`, then abort |
    | DecodeState.HANDSHAKING, ReceiverState.HANDSHAKING | D `lookup()`, or `hold("hello")` at first contact |
    | DecodeState.PREALLOCATING, ReceiverState.AGREED | D `gate("preallocate")` |
    | DecodeState.RECEIVING, ReceiverState.RECEIVING | P `hold("complete")` |
    | DecodeState.RUNNING | D `gate("compute", skip=n)`: after n steps of the batch |
    | DecodeState.RETRACTED | D `gate("resume")` |
    | ReceiverState.DRAINING | P `hold("drained")`, then abort while receiving |

    READY of decode, and the ends, are passed through within one turn of the loop.

    `inject` takes any rules (`engine/faults.py` has the fields); the other methods build one. Each adds to
    the rules in force, and all counts begin anew. As a context manager it releases at the end, also when a
    test fails.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.rules: list[Rule] = []

    # ---- what goes wrong ------------------------------------------------------------------------------

    def inject(self, *rules: Rule, seed: int | None = None) -> None:
        """More rules, after those in force. `seed` of the random numbers, which begin anew."""
        self.rules += rules
        self._post({"rules": self.rules, "seed": seed})

    def hold(self, kind: str | None = None, *, where: str = "send", **rule: Any) -> None:
        """Control messages of this kind (any if None) that this worker sends, or with `where="receive"`
        gets. `rule`: `room`, `skip`, `count`, `probability`."""
        self.inject(_message("hold", kind, where, rule))

    def drop(self, kind: str | None = None, *, where: str = "send", **rule: Any) -> None:
        self.inject(_message("drop", kind, where, rule))

    def duplicate(self, kind: str | None = None, *, where: str = "send", **rule: Any) -> None:
        self.inject(_message("duplicate", kind, where, rule))

    def corrupt(self, kind: str | None = None, **rule: Any) -> None:
        """`how`: `noise`, `truncate`, `version`, `oversize`; drawn from the first three if not given."""
        self.inject(_message("corrupt", kind, "send", rule))

    def delay(self, seconds: float, kind: str | None = None, *, where: str = "send", **rule: Any) -> None:
        self.inject(_message("delay", kind, where, {"seconds": seconds, **rule}))

    def stall(self, **rule: Any) -> None:
        """Page writes, which the transfer library then doesn't see. Prefill only, like the next two."""
        self.inject({"where": "write", "action": "stall", **rule})

    def fail_writes(self, *, late: bool = False, **rule: Any) -> None:
        """`late`: the bytes land all the same, at the release or after `seconds`."""
        self.inject({"where": "write", "action": "fail_late" if late else "fail", **rule})

    def corrupt_writes(self, **rule: Any) -> None:
        """One page of each write carries another page's bytes."""
        self.inject({"where": "write", "action": "corrupt", **rule})

    def lookup(self, action: str = "hold", **rule: Any) -> None:
        """Decode only: the question to the bootstrap service that each request asks first."""
        self.inject({"where": "lookup", "action": action, **rule})

    def gate(self, gate: str, **rule: Any) -> None:
        """Hold a step of the scheduler: `admit`, `compute` (prefill), `preallocate`, `compute`, `resume`
        (decode). The loop goes on: messages, aborts and deadlines are handled."""
        self.inject(gate_rule(gate, **rule))

    # ---- what has happened ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The answer of `GET /faults`: `seed`, `rules` (each with `rule`, `matched`, `fired`), `held`."""
        status, answer = self._client.get("/faults")
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def held(self, **like: Any) -> list[dict[str, Any]]:
        """What is held now and has these values, such as `kind="complete"` or `where="write"`."""
        return [e for e in self.state()["held"] if all(e[name] == value for name, value in like.items())]

    def wait_held(self, count: int = 1, *, seconds: float = 20.0, **like: Any) -> list[dict[str, Any]]:
        """Until at least `count` are held (as in `held`); returns them."""
        return self._wait(lambda: self.held(**like), lambda found: len(found) >= count, seconds)

    def fired(self) -> int:
        """Times that any rule in force has fired."""
        return sum(entry["fired"] for entry in self.state()["rules"])

    def wait_fired(self, count: int = 1, *, seconds: float = 20.0) -> int:
        return self._wait(self.fired, lambda fired: fired >= count, seconds)

    # ---- its end --------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let go of what is held now; the rules stay, so that the next is held again."""
        self._post({"release": True})

    def release(self) -> None:
        """Nothing is injected any more, and nothing held. Also what stalled or was delayed goes on."""
        self.rules = []
        self._post({"rules": [], "release": True})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _post(self, change: dict[str, Any]) -> None:
        self._client.ok("/faults", {name: value for name, value in change.items() if value is not None})

    def _wait(self, look: Callable[[], Any], enough: Callable[[Any], bool], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while not enough(found := look()):
            assert time.monotonic() < deadline, f"{found} after {seconds:g} s: {self.state()}"
            time.sleep(0.01)
        return found


def gate_rule(gate: str, **rule: Any) -> Rule:
    return {"where": gate, "action": "hold", **rule}


def _message(action: str, kind: str | None, where: str, rule: Rule) -> Rule:
    return {"where": where, "action": action, **({"kind": kind} if kind else {}), **rule}
