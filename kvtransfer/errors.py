"""Typed errors of the transfer layer."""

from __future__ import annotations


class TransferError(RuntimeError):
    """A peer, an endpoint or an index that can't be used. The message is fit for a client to read."""


class DuplicateRoom(TransferError):
    """The room is active on this worker; its first request goes on unharmed. Answer with a 400."""

    def __init__(self, room: int) -> None:
        super().__init__(f"bootstrap_room {room} is already active on this worker")
        self.room = room


class UnknownRoom(TransferError):
    """No active session for this room: it never opened, or it failed or ended."""

    def __init__(self, room: int) -> None:
        super().__init__(f"bootstrap_room {room} is not active on this worker")
        self.room = room


class SecretMismatch(TransferError):
    """This worker and another don't have the same cluster secret, or only one of them has one."""


class IllegalMove(AssertionError):
    """A session was asked for a move its table does not list: a bug of ours, never of a peer."""
