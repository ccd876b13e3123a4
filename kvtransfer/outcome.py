"""How a failed transfer ends a request for its client."""

from __future__ import annotations

from diptych.engine.wire import Finish
from diptych.kvtransfer.events import Failed

CLIENT_CLOSED_REQUEST = 499
"""The status that marks a room called off by a client, not failed by a worker."""


def transfer_finish(event: Failed) -> Finish:
    """A peer whose client left is an abort; anything else an error with the reason both sides know."""
    if event.status == CLIENT_CLOSED_REQUEST:
        return Finish(kind="abort", message=event.reason)
    return Finish(kind="error", message=event.reason, status=event.status)
