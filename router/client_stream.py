"""The client's side of a relayed answer: nothing is sent until the first byte, and no broken answer can
be mistaken for a whole one."""

from __future__ import annotations

import asyncio
import logging
import re

from aiohttp import web

from diptych.router.errors import RouterError
from diptych.router.journal import JOURNAL

logger = logging.getLogger(__name__)

ERROR_WRITE_TIMEOUT = 1.0
"""Seconds that a client which has stopped reading gets to take the final error event."""

_SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')
"""Of an event of `/v1/responses`."""


class _RelayedResponse(web.StreamResponse):
    """Its head leaves together with the first bytes of its body, as that of aiohttp's own whole answers does:
    one system call and one packet for both."""

    _send_headers_immediately = False


class ClientStream:
    """Wraps one client request and its answer."""

    def __init__(self, request: web.Request, request_id: str) -> None:
        self._request = request
        self._request_id = request_id
        self.journal = request[JOURNAL]
        self._response: web.StreamResponse | None = None
        self._last_chunk = b"\n\n"

    @property
    def started(self) -> bool:
        """True once the head (and so possibly output) may have gone to the client: no retry from here on."""
        return self._response is not None

    async def start(self, status: int, headers: dict[str, str]) -> None:
        """Make the head, which goes out with what is written next, or with the end. Raises
        ConnectionResetError if the client is gone, as do the writers."""
        self._response = _RelayedResponse(status=status, headers=headers)
        await self._response.prepare(self._request)

    async def write(self, chunk: bytes) -> None:
        assert self._response is not None, "start() comes first"
        await self._response.write(chunk)
        self.journal.wrote(len(chunk))
        self._last_chunk = chunk

    async def finish(self) -> web.StreamResponse:
        assert self._response is not None, "start() comes first"
        await self._response.write_eof()
        return self._response

    async def fail(self, error: RouterError) -> web.StreamResponse:
        """End with an error: an ordinary error answer if nothing was sent, in an event stream the events by
        which a worker ends one that failed, and otherwise a connection closed short of the body's announced
        end. After the events the body is complete, so the connection serves the client's next request."""
        self.journal.error = error.message
        response = self._response
        if response is None:
            return error.response()
        logger.warning("request %s failed in mid-stream: %s", self._request_id, error.message)
        self.journal.broken = error.code or "internal_error"
        if response.content_type == "text/event-stream" and response.content_length is None:
            at_event_end = self._last_chunk.endswith((b"\n\n", b"\r\n\r\n"))
            separator = b"" if at_event_end else b"\n\n"
            try:
                async with asyncio.timeout(ERROR_WRITE_TIMEOUT):
                    await response.write(separator + self._last_events(error))
                    await response.write_eof()
            except TimeoutError:
                self._cut(response)
        else:
            self._cut(response)
        return response

    def _last_events(self, error: RouterError) -> bytes:
        if self._request.path == "/v1/responses":  # its events have names, and no end mark
            numbers = _SEQUENCE_NUMBER.findall(self._last_chunk)
            number = int(numbers[-1]) + 1 if numbers else 0
            return b"event: error\ndata: " + error.event(number) + b"\n\n"
        return b"data: " + error.payload() + b"\n\n" + b"data: [DONE]\n\n"

    def _cut(self, response: web.StreamResponse) -> None:
        """Close without the terminating chunk, so that the client's HTTP library reports a short body."""
        response.force_close()
        if self._request.transport is not None:
            self._request.transport.close()
