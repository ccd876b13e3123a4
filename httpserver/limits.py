"""The numbers that bound one HTTP connection."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common_config import get_serving

MAX_LINE_BYTES = 8190
"""Of the request line and of each header line."""
MAX_HEADERS = 128
LINGER_SECONDS = 5.0
"""For the rest of a body that nobody wants, so that its sender gets to read the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    receive_timeout: float
    """Seconds for the head of a request, from its first byte; and for its body, from the end of the head."""
    send_timeout: float
    """Seconds without the client taking anything of an answer that waits for it."""
    keepalive_timeout: float
    """Seconds without a request."""
    max_connections: int


def limits_from_config() -> HttpLimits:
    serving = get_serving()
    return HttpLimits(
        receive_timeout=serving.http_receive_timeout,
        send_timeout=serving.http_send_timeout,
        keepalive_timeout=serving.http_keepalive_timeout,
        max_connections=serving.http_max_connections,
    )
