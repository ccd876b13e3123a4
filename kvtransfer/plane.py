"""What the sender and the receiver need of a control plane: messages between process starts, and the news
that one can't be reached. `control.py` is the real one, over ZMQ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import zmq

from diptych.kvtransfer import wire


@dataclass(frozen=True, slots=True)
class Inbound:
    """A well-formed message for this process."""

    source: str
    body: wire.ControlMessage
    via: object
    """The connection it came by, for `ControlPlane.reply`."""
    link: str | None = None
    """Set when it answers, over a link of ours, what we sent: whom that link was made to."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    target: str
    reason: str
    link: int
    """What `ControlPlane.link` returned."""


class ControlPlane(ABC):
    """Owned by the scheduler's thread; nothing here blocks."""

    instance_id: str
    address: str
    """`tcp://host:port`, what peers connect to."""

    @abstractmethod
    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """What becomes readable when `step` has news."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """When `step` must run although nothing is readable; None for never."""

    @abstractmethod
    def link(self, target: str, address: str) -> int:
        """Have a link to this process start; an existing one is kept. Returns its number, which goes up with
        each link. Raises `TransferError` for an address that can't be one."""

    @abstractmethod
    def unlink(self, target: str) -> None:
        """Close the link, if there is one; what was queued last gets a moment to leave."""

    @abstractmethod
    def send(self, target: str, body: wire.ControlMessage) -> None:
        """Over the link to `target`, which must exist. Raises `wire.WireError` when it is too large."""

    @abstractmethod
    def reply(self, inbound: Inbound, body: wire.ControlMessage) -> None:
        """Over the connection a message came by, link or not."""

    @abstractmethod
    def step(self) -> list[Inbound | LinkDown]:
        """Everything that has come since the last call, messages before losses of their connection."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent. What was queued last (aborts) gets a moment to leave."""


class FramePlane(ControlPlane):
    """One that can also send bytes as they are, for faults that peers must survive."""

    @abstractmethod
    def send_frames(self, target: str, frames: list[bytes]) -> None:
        """Over the link to `target`, which must exist."""

    @abstractmethod
    def reply_frames(self, inbound: Inbound, frames: list[bytes]) -> None:
        """Over the connection a message came by; not at all if that was a link which has been closed."""
