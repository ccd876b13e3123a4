"""A prefill and a decode worker without a model: what their schedulers do with rooms, pages and events."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from diptych.engine.page_allocator import PageAllocator
from diptych.kvtransfer.errors import DuplicateRoom, TransferError, UnknownRoom
from diptych.kvtransfer.events import (
    DestinationReady,
    Drained,
    Failed,
    HandshakeDone,
    Received,
    Sent,
    TransferEvent,
)
from diptych.kvtransfer.receiver import DecodeReceiver
from diptych.kvtransfer.sender import PrefillSender
from diptych.kvtransfer.wire import AuxBlock

PAGE_SIZE = 4


def num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


@dataclass(eq=False, repr=False)
class Use:
    """One request for a room on one worker, from `open` to its terminal event."""

    worker: Worker
    room: int
    num_tokens: int
    pages: list[int] = field(default_factory=list)
    terminal: TransferEvent | None = None
    doomed: bool = False
    """The transfer said that the room is unknown: `Failed` must be on its way."""

    def __repr__(self) -> str:
        return f"<room {self.room} at {self.worker.name}: {self.pages}, {self.terminal}>"


@dataclass(eq=False, repr=False)
class PrefillUse(Use):
    stamps: list[int] = field(default_factory=list)
    """What is in its pages, by page index."""
    checked: bool = True
    """The sender compares token counts, so pages may be sent before the destination is known."""
    num_sent: int = 0
    finished: bool = False
    has_destination: bool = False


@dataclass(eq=False, repr=False)
class DecodeUse(Use):
    prefill: str = ""
    """The slot it asked."""
    first_page_index: int = 0
    agreed: bool = False
    reserved: bool = False


class Worker:
    """Pages, and who owns each."""

    def __init__(self, name: str, slab: torch.Tensor) -> None:
        self.name = name
        self.slab = slab
        self.allocator = PageAllocator(len(slab))
        self.owner: dict[int, Use] = {}
        self.draining: dict[int, Use] = {}
        self.failed: list[tuple[Use, Failed]] = []
        """News, for whoever knows what may fail."""

    def _allocate(self, use: Use, n: int) -> None:
        use.pages = self.allocator.allocate(n)
        self.owner.update(dict.fromkeys(use.pages, use))

    def _release(self, use: Use) -> None:
        self.allocator.release(use.pages)
        self._disown(use)

    def _disown(self, use: Use) -> None:
        for page in use.pages:
            del self.owner[page]

    def _end(self, use: Use, event: TransferEvent) -> None:
        assert use.terminal is None, f"{use} ends again: {event}"
        use.terminal = event
        if isinstance(event, Failed):
            self.failed.append((use, event))

    def stamps(self, pages: list[int]) -> list[int]:
        return [int(stamp) for stamp in self.slab[pages, 0]]


class PrefillWorker(Worker):
    def __init__(self, name: str, slab: torch.Tensor, sender: PrefillSender) -> None:
        super().__init__(name, slab)
        self.sender = sender
        self.uses: dict[int, PrefillUse] = {}

    def open(self, room: int, num_tokens: int, *, checked: bool) -> None:
        """`checked`: the sender compares token counts; else this worker does, as it may."""
        if not self.allocator.can_allocate(num_pages(num_tokens)):
            return
        taken = room in self.uses or room in self.draining
        try:
            self.sender.open(room, num_tokens if checked else None)
        except DuplicateRoom:
            assert taken, f"room {room} is refused although nothing uses it"
            return
        assert not taken, f"room {room} is taken twice"
        use = PrefillUse(self, room, num_tokens, checked=checked)
        self._allocate(use, num_pages(num_tokens))
        self.uses[room] = use

    def send(self, use: PrefillUse, n: int, stamp: int) -> None:
        """Compute `n` more pages, stamped `stamp ..`, and send them."""
        chunk = use.pages[use.num_sent : use.num_sent + n]
        fresh = list(range(stamp, stamp + len(chunk)))
        self.slab[chunk, 0] = torch.tensor(fresh)
        use.stamps += fresh
        try:
            self.sender.send(use.room, chunk, use.num_sent)
        except UnknownRoom:
            use.doomed = True
        use.num_sent += len(chunk)

    def finish(self, use: PrefillUse) -> None:
        use.finished = True
        aux = AuxBlock(room=use.room, prompt_tokens=use.num_tokens, first_token=use.stamps[0])
        try:
            self.sender.finish(use.room, aux)
        except UnknownRoom:
            use.doomed = True

    def recall(self, use: PrefillUse) -> None:
        """Compute it again later, as when pages get short before the destination is known."""
        try:
            self.sender.recall(use.room)
        except UnknownRoom:
            use.doomed = True
            return
        except TransferError:
            return  # the destination has just become known
        use.num_sent, use.finished, use.stamps = 0, False, []

    def step(self) -> None:
        events = self.sender.step()
        for event in events:
            match event:
                case DestinationReady():
                    use = self.uses[event.room]
                    assert not use.has_destination, event
                    use.has_destination = True
                    assert event.first_page_index + event.num_pages == num_pages(event.num_prompt_tokens)
                    if event.num_prompt_tokens != use.num_tokens:
                        self.sender.abort(event.room, "not the same request", 400)
                case Sent():
                    use = self.uses.pop(event.room)
                    self._end(use, event)
                    assert use.finished
                    assert use.num_sent == len(use.pages)
                    assert not use.doomed
                    self._release(use)
                case Failed():
                    use = self.uses.pop(event.room)
                    self._end(use, event)
                    if event.drained:
                        self._release(use)
                    else:
                        self.draining[event.room] = use
                case Drained(room=room):
                    self._release(self.draining.pop(room))
                case _:
                    raise AssertionError(f"{event} at prefill")
        doomed = [use for use in self.uses.values() if use.doomed]
        assert not doomed, f"unknown to the sender, but not failed: {doomed}"


class DecodeWorker(Worker):
    def __init__(self, name: str, slab: torch.Tensor, receiver: DecodeReceiver) -> None:
        super().__init__(name, slab)
        self.receiver = receiver
        self.uses: dict[int, DecodeUse] = {}
        self.running: list[DecodeUse] = []
        self.received: list[DecodeUse] = []
        """News, for whoever knows what must be in the pages."""
        self.first_tokens: dict[DecodeUse, int | None] = {}

    def open(self, room: int, num_tokens: int, prefill: str) -> None:
        taken = room in self.uses or room in self.draining
        try:
            self.receiver.open(room, prefill, 80)
        except DuplicateRoom:
            assert taken, f"room {room} is refused although nothing uses it"
            return
        assert not taken, f"room {room} is taken twice"
        self.uses[room] = DecodeUse(self, room, num_tokens, prefill=prefill)

    def can_reserve(self, use: DecodeUse) -> bool:
        wanted = num_pages(use.num_tokens) - use.first_page_index
        return use.agreed and not use.reserved and self.allocator.can_allocate(wanted)

    def reserve(self, use: DecodeUse, first_page_index: int) -> None:
        """`first_page_index`: pages it claims to have already."""
        use.reserved = True
        use.first_page_index = min(first_page_index, num_pages(use.num_tokens))
        self._allocate(use, num_pages(use.num_tokens) - use.first_page_index)
        try:
            self.receiver.reserve(use.room, use.pages, use.num_tokens, use.first_page_index)
        except UnknownRoom:
            use.doomed = True

    def retire(self, use: DecodeUse) -> None:
        """The request has produced its tokens."""
        self.running.remove(use)
        self._release(use)

    def step(self) -> None:
        events = self.receiver.step()
        for event in events:
            match event:
                case HandshakeDone(room=room):
                    use = self.uses[room]
                    assert not use.agreed, event
                    use.agreed = True
                case Received():
                    use = self.uses.pop(event.room)
                    self._end(use, event)
                    assert use.reserved
                    assert not use.doomed
                    assert event.aux.room == event.room
                    assert event.aux.prompt_tokens == use.num_tokens
                    self.first_tokens[use] = event.aux.first_token
                    self.running.append(use)
                    self.received.append(use)
                case Failed():
                    use = self.uses.pop(event.room)
                    self._end(use, event)
                    if event.drained:
                        self._release(use)
                    else:
                        assert use.reserved
                        self.allocator.quarantine(use.pages)
                        self.draining[event.room] = use
                case Drained(room=room):
                    use = self.draining.pop(room)
                    self.allocator.end_quarantine(use.pages)
                    self._disown(use)
                case _:
                    raise AssertionError(f"{event} at decode")
        doomed = [use for use in self.uses.values() if use.doomed]
        assert not doomed, f"unknown to the receiver, but not failed: {doomed}"
