"""What `PrefillSender.step()` and `DecodeReceiver.step()` report to their scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.kvtransfer.wire import AuxBlock


@dataclass(frozen=True, slots=True)
class HandshakeDone:
    """Receiver: both workers agreed; allocate pages and call `reserve`."""

    room: int


@dataclass(frozen=True, slots=True)
class DestinationReady:
    """Sender: decode has reserved pages, so writes leave as soon as they are sent."""

    room: int
    num_pages: int
    """Pages decode reserved: pages `first_page_index ..` of the request."""
    num_prompt_tokens: int
    """Prompt tokens as decode counted them; compare with your own."""
    first_page_index: int = 0
    """Decode already has the request's pages before this one; `send` skips them by itself."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Sender: every write is in decode's memory and decode has been told. Source pages may be freed."""

    room: int


@dataclass(frozen=True, slots=True)
class Received:
    """Receiver: every page of the room is in place, with what goes with it. The session has ended."""

    room: int
    aux: AuxBlock


@dataclass(frozen=True, slots=True)
class Failed:
    """The room failed, here or at the peer, which has been told. Exactly one per failed room."""

    room: int
    reason: str
    """A sentence for the client."""
    status: int
    """HTTP status for the client."""
    drained: bool
    """True: no write can touch the room's pages any more, free them now. False: keep them out of the pool
    (quarantine) until `Drained(room)`."""


@dataclass(frozen=True, slots=True)
class Drained:
    """No write can touch the pages of this failed room any more: free them."""

    room: int


TransferEvent = HandshakeDone | DestinationReady | Sent | Received | Failed | Drained
