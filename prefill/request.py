"""One request's states on a prefill worker."""

from __future__ import annotations

import enum

from diptych.engine.request import Request
from diptych.engine.sampling import SampledToken, SamplingState
from diptych.engine.wire import Finish, Generate
from diptych.kvtransfer.wire import AuxBlock


class PrefillState(enum.Enum):
    BOOTSTRAPPING = "waiting for the destination, nothing computed"
    WAITING = "queued for compute"
    FORWARDING = "computing, pages leaving"
    TRANSFERRING = "last pages in flight"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


_ENDS = {PrefillState.FAILED, PrefillState.ABORTED}

LEGAL_MOVES: dict[PrefillState, set[PrefillState]] = {
    # Computed before its destination is known, or, from there, put back for others.
    PrefillState.BOOTSTRAPPING: {PrefillState.WAITING, PrefillState.FORWARDING, *_ENDS},
    PrefillState.WAITING: {PrefillState.FORWARDING, *_ENDS},
    PrefillState.FORWARDING: {PrefillState.TRANSFERRING, PrefillState.BOOTSTRAPPING, *_ENDS},
    PrefillState.TRANSFERRING: {PrefillState.DONE, PrefillState.BOOTSTRAPPING, *_ENDS},
    PrefillState.DONE: set(),
    PrefillState.FAILED: set(),
    PrefillState.ABORTED: set(),
}


class PrefillRequest(Request):
    """A prompt to compute and push into a decode worker's pages."""

    def __init__(self, message: Generate, state: SamplingState, *, room: int) -> None:
        super().__init__(message, state)
        self.room = room
        self.phase = PrefillState.BOOTSTRAPPING
        self.num_sent_pages = 0
        self.first_cached_tokens: int | None = None
        """`cached_tokens` of the first admission: after it was put back, what it finds is its own work."""
        self.first_token: SampledToken | None = None
        self.ending: Finish | None = None
        """Why the client's side ended the request, while its transfer is being called off."""

    def move(self, phase: PrefillState) -> None:
        assert phase in LEGAL_MOVES[self.phase], f"{self.rid}: {self.phase.name} → {phase.name}"
        self.phase = phase

    def put_back(self) -> None:
        """Forget what was computed; the pages are already given up."""
        self.move(PrefillState.BOOTSTRAPPING)
        self.num_computed = self.num_sent_pages = 0
        self.match = None
        self.first_token = None
        self.prompt_logprobs = [None]

    def unsent_pages(self, page_size: int) -> list[int]:
        """Pages that are final and have not been sent: the whole ones, and the partial one at the end."""
        final = len(self.pages) if self.prefilled else self.num_computed // page_size
        return [int(page) for page in self.pages[self.num_sent_pages : final]]

    def aux(self) -> AuxBlock:
        """What decode needs beside the pages."""
        token = self.first_token
        return AuxBlock(
            room=self.room,
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens,
            first_token=None if token is None else token.token_id,
            first_logprob=None if token is None else token.logprob,
            prompt_logprobs=self.prompt_logprobs if self.params.prompt_logprobs is not None else None,
        )
