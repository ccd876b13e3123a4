"""Reserved pages of failed rooms: kept until prefill says that no write can touch them, or is proven dead."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.kvtransfer.probe import Peer

_MAX_RETRANSMISSION_S = 120.0
"""The longest that Linux waits between two tries to get a segment across (`TCP_RTO_MAX`)."""


@dataclass(slots=True)
class Held:
    room: int
    lease: int
    num_pages: int
    peer: Peer
    reason: str
    status: int
    ask_at: float
    """When to ask prefill (again); `time.monotonic()`. The first time is one interval after the failure."""
    release_at: float | None = None
    """Set once drained: bytes that a socket buffer still holds get a moment to land first."""
    failed_at: float = field(init=False, default=0.0)


class Quarantine:
    def __init__(self, *, ask_interval: float, settle: float) -> None:
        """`ask_interval`: also the longest that a network can be gone before a room fails for it. `settle`:
        seconds to wait after a drain that wasn't clean or was concluded from a death."""
        self._ask_interval = ask_interval
        self._settle = settle
        self._held: dict[int, Held] = {}

    def __contains__(self, room: int) -> bool:
        return room in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_pages(self) -> int:
        return sum(held.num_pages for held in self._held.values())

    def add(self, held: Held) -> None:
        held.failed_at = held.ask_at - self._ask_interval
        self._held[held.room] = held

    def drained(self, instance_id: str, room: int, lease: int, clean: bool, now: float) -> None:
        """Prefill's word for one lease; anything that doesn't match a held room is ignored."""
        held = self._held.get(room)
        if held is not None and held.lease == lease and held.peer.instance_id == instance_id:
            self._release(held, now if clean else now + self._settling(held, now))

    def dead(self, instance_id: str, now: float) -> None:
        """That process can post nothing any more."""
        for held in self._held.values():
            if held.peer.instance_id == instance_id:
                self._release(held, now + self._settling(held, now))

    def _settling(self, held: Held, now: float) -> float:
        """Seconds until nothing can come out of a socket buffer any more, not even one of a dead process.

        The kernel goes on sending what a killed process had written. After an outage it tries again within as
        long as the outage has lasted, because it doubles the pause each time; and no outage is older than the
        room's failure by more than it takes to notice one. Between processes of one host nothing is lost."""
        if held.peer.identity.is_of_this_host():
            return self._settle
        outage = now - held.failed_at + self._ask_interval
        return self._settle + min(outage, _MAX_RETRANSMISSION_S)

    @staticmethod
    def _release(held: Held, at: float) -> None:
        held.release_at = at if held.release_at is None else min(at, held.release_at)

    def next_deadline(self) -> float | None:
        return min(
            (h.ask_at if h.release_at is None else h.release_at for h in self._held.values()), default=None
        )

    def released(self, now: float) -> list[Held]:
        """Take the rooms whose pages are safe."""
        safe = [h for h in self._held.values() if h.release_at is not None and h.release_at <= now]
        for held in safe:
            del self._held[held.room]
        return safe

    def to_ask(self, now: float) -> list[Held]:
        """The rooms about which prefill must be asked now; each comes up again after the interval."""
        due = [h for h in self._held.values() if h.release_at is None and h.ask_at <= now]
        for held in due:
            held.ask_at = now + self._ask_interval
        return due
