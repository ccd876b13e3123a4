"""What to make of the failures of a pair of legs: what the client is told, and who is charged."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.router.legs import FailureKind, LegFailure
from diptych.router.workers import Worker, WorkerRole


def prefer(failures: Sequence[LegFailure]) -> LegFailure:
    """Of failures seen together, the one that decides: a 4xx (decode's rather than prefill's), then one
    that makes another attempt safe, then one that isn't about the peer, then decode's."""

    def rank(failure: LegFailure) -> tuple[bool, bool, bool, bool]:
        return (
            failure.kind is not FailureKind.REJECTED,
            not failure.not_run,
            failure.may_be_the_peers,
            failure.worker.role is not WorkerRole.DECODE,
        )

    return min(failures, key=rank)


def guilty(failures: Sequence[LegFailure], pair: Sequence[Worker]) -> list[Worker]:
    """The workers whose breakers count a failed attempt.

    Nobody is charged for a client's mistake (4xx) or for being full (503), nor for what followed from
    either on the other leg. A worker is charged for what it provably did: no connection, a connection that
    broke, silence, an error of its own. Where there are only reports that a transfer failed (502, 504), both
    may have done it and both are charged: the innocent one soon has a success with another partner.
    """
    if any(f.kind in (FailureKind.REJECTED, FailureKind.REFUSED) for f in failures):
        return [f.worker for f in failures if f.kind in (FailureKind.CONNECT, FailureKind.BROKEN)]
    proven = [f.worker for f in failures if not f.may_be_the_peers]
    return proven or list(pair)
