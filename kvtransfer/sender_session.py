"""One room on prefill's side."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.kvtransfer.backends.interface import PageWrite, WriteState
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.states import SENDER_MOVES, Machine, SenderState
from diptych.kvtransfer.wire import AuxBlock, Reserve

TERMINAL = frozenset({SenderState.DONE, SenderState.FAILED, SenderState.DRAINED})
"""No session stays in one of these."""
FAILING = frozenset({SenderState.FAILED, SenderState.DRAINING, SenderState.DRAINED})


class SenderSession(Machine[SenderState]):
    def __init__(self, room: int, deadline: float, num_prompt_tokens: int | None) -> None:
        super().__init__(SenderState.AWAITING_DESTINATION, SENDER_MOVES)
        self.room = room
        self.num_prompt_tokens = num_prompt_tokens
        """What a reservation must be for; None when the owner of the sender looks itself."""
        self.deadline: float | None = deadline
        """Of the current state, on the clock of the parts."""
        self.due = deadline
        """Once pages are reserved: when the last one must be in place."""
        self.peer: str | None = None
        """Instance id of the decode worker that reserved pages."""
        self.reservation: Reserve | None = None
        self.queued: list[tuple[list[int], int]] = []
        """Chunks sent before the destination was known."""
        self.writes: list[PageWrite] = []
        """Not yet seen in a final state."""
        self.written: set[int] = set()
        """Distinct destination pages posted."""
        self.checksums: dict[int, bytes] = {}
        """By destination page, where the reservation asks for them."""
        self.aux: AuxBlock | None = None
        self.finished_at = 0.0
        """When it was set: the last page was computed."""
        self.clean = True
        """No write ended in error."""

    @property
    def lease(self) -> int:
        """Of the reservation; 0 before there is one."""
        return self.reservation.lease if self.reservation is not None else 0

    def misfit(self, reserve: Reserve, page_size: int) -> str | None:
        """Why a reservation can't be for this room's prompt, or None."""
        here = self.num_prompt_tokens
        if here is None:
            return None
        if reserve.num_prompt_tokens != here:
            return (
                f"prefill counts {here} prompt tokens, decode {reserve.num_prompt_tokens}: "
                "the two workers did not get the same request"
            )
        pages = -(-here // page_size)
        if reserve.first_page_index + len(reserve.pages) != pages:
            return (
                f"decode reserved {len(reserve.pages)} pages from page {reserve.first_page_index} on, "
                f"the prompt fills {pages}"
            )
        return None

    def destinations(self, src_pages: Sequence[int], first_page_index: int) -> tuple[list[int], list[int]]:
        """Source and destination pages of a chunk, without the pages decode already has.
        Raises `TransferError` when the chunk goes beyond the reservation."""
        assert self.reservation is not None
        offset = first_page_index - self.reservation.first_page_index
        have = max(0, -offset)
        src = list(src_pages[have:])
        start = offset + have
        end = start + len(src)
        if first_page_index < 0 or (src and end > len(self.reservation.pages)):
            last = self.reservation.first_page_index + len(self.reservation.pages) - 1
            raise TransferError(
                f"pages {first_page_index}..{first_page_index + len(src_pages) - 1} of room {self.room} go "
                f"beyond the last page decode reserved, {last}"
            )
        return src, self.reservation.pages[start:end]

    @property
    def wants_checksums(self) -> bool:
        return self.reservation is not None and self.reservation.checksum

    def settled(self) -> list[PageWrite]:
        """Take the writes that have become final."""
        final = [write for write in self.writes if write.state is not WriteState.IN_FLIGHT]
        if final:
            self.writes = [write for write in self.writes if write.state is WriteState.IN_FLIGHT]
        return final
