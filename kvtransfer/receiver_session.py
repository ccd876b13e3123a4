"""One room on decode's side."""

from __future__ import annotations

from diptych.kvtransfer import wire
from diptych.kvtransfer.checksum import Verification
from diptych.kvtransfer.probe import Peer
from diptych.kvtransfer.states import RECEIVER_MOVES, Machine, ReceiverState


class ReceiverSession(Machine[ReceiverState]):
    def __init__(self, room: int, lease: int, bootstrap: tuple[str, int], deadline: float) -> None:
        super().__init__(ReceiverState.HANDSHAKING, RECEIVER_MOVES)
        self.room = room
        self.lease = lease
        """Tells this use of the room from every other by this process."""
        self.bootstrap = bootstrap
        self.deadline: float | None = deadline
        """Of the current state, `time.monotonic()`."""
        self.peer: Peer | None = None
        """The prefill worker, once looked up."""
        self.joined_lookup = False
        """The look-up it waits for began before the room was opened, maybe in an outage that is over."""
        self.pages: list[int] = []
        self.first_page_index = 0
        self.num_prompt_tokens = 0
        self.complete: wire.Complete | None = None
        """What prefill announced, while the pages are compared with it."""
        self.verification: Verification | None = None

    def is_with(self, instance_id: str) -> bool:
        """The prefill worker of this room is that process."""
        return self.peer is not None and self.peer.instance_id == instance_id

    def problem(self, complete: wire.Complete, *, page_size: int, vocab_size: int) -> str | None:
        """Why what prefill reports doesn't fit what was reserved, or can't be used; None when it can."""
        aux = complete.aux
        if aux.room != self.room:
            return f"the aux block is stamped with room {aux.room}, not {self.room}"
        if aux.prompt_tokens != self.num_prompt_tokens:
            return f"prompt tokens: {aux.prompt_tokens} at prefill, {self.num_prompt_tokens} at decode"
        needed = max(0, -(-aux.prompt_tokens // page_size) - self.first_page_index)
        if complete.num_pages != needed:
            return f"prefill wrote {complete.num_pages} of {needed} pages"
        return _unusable(aux, vocab_size)


def _unusable(aux: wire.AuxBlock, vocab_size: int) -> str | None:
    """Numbers that no prefill worker can have meant, and that would index out of something here."""
    if aux.first_token is not None and not 0 <= aux.first_token < vocab_size:
        return f"first token: {aux.first_token} is not one of the vocabulary's {vocab_size}"
    if not 0 <= aux.cached_tokens <= aux.prompt_tokens:
        return f"cached tokens: {aux.cached_tokens} of a prompt of {aux.prompt_tokens}"
    if aux.prompt_logprobs is not None and len(aux.prompt_logprobs) != aux.prompt_tokens:
        return f"{len(aux.prompt_logprobs)} prompt log-probabilities of {aux.prompt_tokens} tokens"
    for entry in (aux.first_logprob, *(aux.prompt_logprobs or ())):
        if entry is None:
            continue
        ids = (entry.token_id, *(token_id for token_id, _ in entry.top))
        if min(ids) < 0 or max(ids) >= vocab_size:
            return f"a log-probability of a token that is not one of the vocabulary's {vocab_size}"
    return None
