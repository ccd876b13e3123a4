"""The two transfer sessions as tables of legal moves. Anything else is a bug and raises `IllegalMove`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from diptych.kvtransfer.errors import IllegalMove


class SenderState(enum.Enum):
    AWAITING_DESTINATION = "awaiting destination"
    READY = "ready"
    """Decode has reserved pages; nothing is written yet."""
    SENDING = "sending"
    FINISHING = "finishing"
    """The last page is posted; waiting for writes to become final."""
    CONFIRMING = "confirming"
    """Every write is final and decode was told; it compares checksums."""
    DONE = "done"
    FAILED = "failed"
    DRAINING = "draining"
    """Failed, and writes are still in flight."""
    DRAINED = "drained"


class ReceiverState(enum.Enum):
    HANDSHAKING = "handshaking"
    AGREED = "agreed"
    """Both workers match; pages are not reserved yet."""
    RECEIVING = "receiving"
    VERIFYING = "verifying"
    """Every write is final; the pages' checksums are compared."""
    DONE = "done"
    FAILED = "failed"
    DRAINING = "draining"
    """Failed, and prefill may still write into the reserved pages."""
    DRAINED = "drained"


_S = SenderState
SENDER_MOVES: Mapping[SenderState, frozenset[SenderState]] = {
    _S.AWAITING_DESTINATION: frozenset({_S.READY, _S.FAILED}),
    _S.READY: frozenset({_S.SENDING, _S.FINISHING, _S.FAILED}),
    _S.SENDING: frozenset({_S.FINISHING, _S.FAILED}),
    _S.FINISHING: frozenset({_S.CONFIRMING, _S.DONE, _S.FAILED}),
    _S.CONFIRMING: frozenset({_S.DONE, _S.FAILED}),
    _S.FAILED: frozenset({_S.DRAINING, _S.DRAINED}),
    _S.DRAINING: frozenset({_S.DRAINED}),
    _S.DONE: frozenset(),
    _S.DRAINED: frozenset(),
}

_R = ReceiverState
RECEIVER_MOVES: Mapping[ReceiverState, frozenset[ReceiverState]] = {
    _R.HANDSHAKING: frozenset({_R.AGREED, _R.FAILED}),
    _R.AGREED: frozenset({_R.RECEIVING, _R.FAILED}),
    _R.RECEIVING: frozenset({_R.VERIFYING, _R.DONE, _R.FAILED}),
    _R.VERIFYING: frozenset({_R.DONE, _R.FAILED}),
    _R.FAILED: frozenset({_R.DRAINING, _R.DRAINED}),
    _R.DRAINING: frozenset({_R.DRAINED}),
    _R.DONE: frozenset(),
    _R.DRAINED: frozenset(),
}

StateT = TypeVar("StateT", SenderState, ReceiverState)


class Machine(Generic[StateT]):
    """A current state and the only way to change it."""

    def __init__(self, start: StateT, moves: Mapping[StateT, frozenset[StateT]]) -> None:
        self.state: StateT = start
        self._moves: Mapping[StateT, frozenset[StateT]] = moves

    def move(self, to: StateT) -> None:
        """Raises `IllegalMove` unless the table lists it."""
        if to not in self._moves[self.state]:
            raise IllegalMove(f"{type(to).__name__}: {self.state.value} → {to.value} is not a legal move")
        self.state = to
