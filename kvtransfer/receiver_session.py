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
        self.pages: list[int] = []
        self.first_page_index = 0
        self.num_prompt_tokens = 0
        self.complete: wire.Complete | None = None
        """What prefill announced, while the pages are compared with it."""
        self.verification: Verification | None = None

    def is_with(self, instance_id: str) -> bool:
        """The prefill worker of this room is that process."""
        return self.peer is not None and self.peer.instance_id == instance_id

    def incomplete(self, num_pages: int, prompt_tokens: int, page_size: int) -> str | None:
        """Why what prefill reports doesn't fit what was reserved, or None."""
        if prompt_tokens != self.num_prompt_tokens:
            return f"prompt tokens: {prompt_tokens} at prefill, {self.num_prompt_tokens} at decode"
        needed = max(0, -(-prompt_tokens // page_size) - self.first_page_index)
        if num_pages < needed:
            return f"prefill wrote {num_pages} of {needed} pages"
        return None
