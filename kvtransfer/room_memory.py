"""What prefill remembers of rooms that aren't active: messages that overtook or outlived their request."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from diptych.kvtransfer.wire import Reserve

_MAX_ENDED = 16384


@dataclass(frozen=True, slots=True)
class EarlyReservation:
    """Decode reserved pages before the request reached this worker."""

    source: str
    reserve: Reserve
    deadline: float

    def is_of(self, source: str, lease: int) -> bool:
        return (self.source, self.reserve.lease) == (source, lease)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a room can't begin."""

    reason: str
    status: int
    deadline: float


class RoomMemory:
    """Every entry but the last kind has a deadline."""

    def __init__(self) -> None:
        self.early: dict[int, EarlyReservation] = {}
        self.refused: dict[int, Verdict] = {}
        """Decode gave the room up before the request came: the request fails when it does."""
        self.failed_here: dict[int, Verdict] = {}
        """The request failed here before decode reserved pages: the reservation fails when it comes."""
        self._ended: OrderedDict[tuple[str, int], bool] = OrderedDict()

    def end_lease(self, source: str, lease: int, clean: bool) -> None:
        """No write of this lease is in flight and none may ever be posted."""
        self._ended[source, lease] = clean
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def ended(self, source: str, lease: int) -> bool | None:
        """Whether the lease ended cleanly; None if it has not ended, as far as remembered."""
        return self._ended.get((source, lease))

    def next_deadline(self) -> float | None:
        deadlines = [e.deadline for e in self.early.values()]
        deadlines += [v.deadline for v in self.refused.values()]
        deadlines += [v.deadline for v in self.failed_here.values()]
        return min(deadlines, default=None)

    def expire(self, now: float) -> list[EarlyReservation]:
        """Drop what is over; returns the reservations whose request never came."""
        for verdicts in (self.refused, self.failed_here):
            for room in [room for room, verdict in verdicts.items() if verdict.deadline <= now]:
                del verdicts[room]
        late = [entry for entry in self.early.values() if entry.deadline <= now]
        for entry in late:
            del self.early[entry.reserve.room]
        return late
