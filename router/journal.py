"""What happened to one request, for the access log."""

from __future__ import annotations

import dataclasses
import time

from aiohttp import web


@dataclasses.dataclass(slots=True)
class Journal:
    """Filled in by whoever answers; a route that isn't relayed leaves most of it empty."""

    started: float = dataclasses.field(default_factory=time.monotonic)
    prefill: str | None = None
    """URL of the worker of the last attempt, as `decode`."""
    decode: str | None = None
    attempts: int = 0
    first_byte: float | None = None
    """`time.monotonic()`, when the first byte of a relayed answer had gone to the client."""
    sent: int = 0
    """Bytes of a relayed answer's body so far."""

    error: str | None = None
    """Why the router could not give the client what it asked for, as the client is told it."""
    broken: str | None = None
    """The error's code, if the answer failed after its head had gone out: its status doesn't tell then."""

    def attempt(self, prefill: str, decode: str) -> None:
        self.attempts += 1
        self.prefill, self.decode = prefill, decode

    def wrote(self, size: int) -> None:
        if self.first_byte is None:
            self.first_byte = time.monotonic()
        self.sent += size


JOURNAL = web.RequestKey("journal", Journal)
