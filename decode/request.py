"""One request's states on a decode worker."""

from __future__ import annotations

import enum

from diptych.engine.request import Request
from diptych.engine.sampling import SamplingState
from diptych.engine.wire import Finish, Generate


class DecodeState(enum.Enum):
    HANDSHAKING = "meeting the prefill worker"
    PREALLOCATING = "waiting for pages"
    RECEIVING = "waiting for the prompt's KV"
    READY = "KV in place"
    RUNNING = "decoding"
    RETRACTED = "parked on the host"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


_ENDS = {DecodeState.FAILED, DecodeState.ABORTED}

LEGAL_MOVES: dict[DecodeState, set[DecodeState]] = {
    DecodeState.HANDSHAKING: {DecodeState.PREALLOCATING, *_ENDS},
    DecodeState.PREALLOCATING: {DecodeState.RECEIVING, *_ENDS},
    DecodeState.RECEIVING: {DecodeState.READY, *_ENDS},
    DecodeState.READY: {DecodeState.RUNNING, DecodeState.DONE, *_ENDS},
    DecodeState.RUNNING: {DecodeState.RETRACTED, DecodeState.DONE, *_ENDS},
    DecodeState.RETRACTED: {DecodeState.RUNNING, *_ENDS},
    DecodeState.DONE: set(),
    DecodeState.FAILED: set(),
    DecodeState.ABORTED: set(),
}

# The transfer session is alive: ending the request goes through the receiver.
IN_TRANSFER = {DecodeState.HANDSHAKING, DecodeState.PREALLOCATING, DecodeState.RECEIVING}


class DecodeRequest(Request):
    """A request whose prompt is computed elsewhere."""

    def __init__(self, message: Generate, state: SamplingState, *, room: int, host: str, port: int) -> None:
        super().__init__(message, state)
        self.room = room
        self.bootstrap_host = host
        self.bootstrap_port = port
        self.phase = DecodeState.HANDSHAKING
        self.ending: Finish | None = None
        """Why the client's side ended the request, while its transfer is being called off."""

    @property
    def prefill_worker(self) -> tuple[str, int]:
        """Known by the address of its bootstrap service."""
        return self.bootstrap_host, self.bootstrap_port

    def move(self, phase: DecodeState) -> None:
        assert phase in LEGAL_MOVES[self.phase], f"{self.rid}: {self.phase.name} → {phase.name}"
        self.phase = phase
