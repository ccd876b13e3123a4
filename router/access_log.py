"""`--log-requests`: one line of JSON for each request that ends, and nothing else on that line."""

from __future__ import annotations

import datetime
import logging
import sys
import time

import msgspec
from aiohttp import web

from diptych.httpserver.request_id import REQUEST_ID
from diptych.router.journal import Journal

CLIENT_LEFT = 499
"""Instead of a status: the client left before its answer was complete."""

access_logger = logging.getLogger("diptych.router.access")


def set_up() -> None:
    """To stderr, beside the ordinary log, whose lines don't begin with a brace; whatever `--log-level` is."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access_logger.handlers = [handler]
    access_logger.propagate = False
    access_logger.setLevel(logging.INFO)


def log_access(
    request: web.Request, route: str, status: int, journal: Journal, response: web.StreamResponse | None
) -> None:
    """`response`: None if none was made, because the client left or something broke."""
    now = time.monotonic()
    sent = journal.sent
    if not sent and isinstance(response, web.Response) and isinstance(response.body, bytes):
        sent = len(response.body)
    line = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "id": request[REQUEST_ID],
        "client": request.remote,
        "method": request.method,
        "route": route,
        "path": request.path,
        "status": status,
        "outcome": _outcome(status, journal),
        "error": journal.error,
        "prefill": journal.prefill,
        "decode": journal.decode,
        "attempts": journal.attempts,
        "ttft": None if journal.first_byte is None else _seconds(journal.first_byte - journal.started),
        "duration": _seconds(now - journal.started),
        "bytes": sent,
    }
    access_logger.info(msgspec.json.encode(line).decode())


def _outcome(status: int, journal: Journal) -> str:
    if status == CLIENT_LEFT:
        return "left"
    if journal.broken is not None:
        return "broken"
    return "ok" if status < 400 else "error"


def _seconds(value: float) -> float:
    return round(value, 6)
