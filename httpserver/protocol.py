"""One HTTP connection that a slow, silent or broken client can't hold open, and whose every error is JSON.

| what the client does | what happens |
|---|---|
| sends no request | closed after `keepalive_timeout` |
| drips the head of one | 408 `receive_timeout` after its first byte |
| drips the body of one | 408 `receive_timeout` after the head |
| doesn't read its answer | cut off after `send_timeout`, and so the request is cancelled |
| sends what isn't HTTP | 400, or 431 for a line that is too long |
| is one too many | 503 |

A request that is being answered has no bound here, however long nothing is sent: that is its handler's
affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import socket
from collections.abc import Callable, Iterator

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.typedefs import Handler

from diptych.httpserver.errors import error_body
from diptych.httpserver.limits import LINGER_SECONDS, MAX_HEADERS, MAX_LINE_BYTES, HttpLimits
from diptych.httpserver.refusals import Cause, Refusals
from diptych.httpserver.request_id import HEADER, new_request_id, request_id


class BodyTooSlow(TimeoutError):
    """Reading a request's body raises it: the body did not arrive in time. Answer with a 408."""


class _PeersFault(logging.Filter):
    """Drops what a peer did wrong: broken HTTP, or another protocol (a gRPC probe opens with HTTP/2). It has
    got its answer; a trace in the log would only hide what is ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)


logger = logging.getLogger(__name__)
logger.addFilter(_PeersFault())


class BoundedProtocol(web.RequestHandler):
    """aiohttp's connection with the bounds above."""

    __slots__ = ("_answers", "_deadline", "_limits", "_refusals", "_server")

    def __init__(
        self,
        manager: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        limits: HttpLimits,
        refusals: Refusals,
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            logger=logger,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=limits.keepalive_timeout,
            lingering_time=LINGER_SECONDS,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
        )
        self._server = manager
        self._limits = limits
        self._refusals = refusals
        self._answers = False
        """A request is with its handler."""
        self._deadline: asyncio.TimerHandle | None = None
        """Of the head, or of the body, that is arriving."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # How long the client may leave sent bytes unacknowledged, or its window closed to those that wait.
        # Then the kernel breaks the connection, however much of them it has room for itself.
        milliseconds = max(1, int(self._limits.send_timeout * 1000))
        transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds
        )
        if len(self._server.connections) > self._limits.max_connections:
            message = "too many open connections (--http-max-connections)"
            self._refuse(Cause.TOO_MANY, 503, message, "service_unavailable")

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if data and not self._answers and self._deadline is None:
            self._start_deadline(self._head_too_slow)
        super().data_received(data)

    @contextlib.contextmanager
    def answering(self, request: web.Request) -> Iterator[None]:
        """The head has arrived, and the handler runs: from now on only the body has a deadline."""
        self._stop_deadline()
        self._answers = True
        content = request.content
        if not content.is_eof():
            self._start_deadline(
                lambda: content.set_exception(
                    BodyTooSlow(
                        f"the request body did not arrive within {self._limits.receive_timeout:g} s "
                        "(--http-receive-timeout)"
                    )
                )
            )
            content.on_eof(self._stop_deadline)
        try:
            yield
        finally:
            self._stop_deadline()
            self._answers = False

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Refusals that aiohttp makes before any middleware runs (417), in the shape of all other errors."""
        self._stop_deadline()
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            body = error_body(resp.reason or "refused", code=f"http_{resp.status}")
            resp = web.Response(body=body, status=resp.status, content_type="application/json")
            resp.headers[HEADER] = request_id(request)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP, and what no middleware has caught, in the shape of all other errors."""
        self._stop_deadline()
        peers_fault = isinstance(exc, HttpProcessingError)
        if not peers_fault:
            self.log_exception("answering %s failed", request.remote, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("part of an answer is sent; no other can follow")
        if isinstance(exc, LineTooLong):
            status = 431
            what = f"a line of the request's head is longer than {MAX_LINE_BYTES} bytes"
            self._refusals.add(Cause.LONG_HEAD, self._peer(), what)
            body = error_body(what, code="head_too_large")
        elif peers_fault:
            # Its first line says what; the others quote the bytes.
            what = (message or "").strip().partition("\n")[0].rstrip(":. ") or "unreadable"
            self._refusals.add(Cause.MALFORMED, self._peer(), f"not valid HTTP: {what}")
            body = error_body(f"the request is not valid HTTP: {what}", code="malformed_http")
        else:
            body = error_body("internal error; the log says more", type="internal_error")
        response = web.Response(body=body, status=status, content_type="application/json")
        response.headers[HEADER] = request_id(request)
        response.force_close()
        return response

    def _start_deadline(self, passed: Callable[[], None]) -> None:
        self._deadline = asyncio.get_running_loop().call_later(self._limits.receive_timeout, passed)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_too_slow(self) -> None:
        self._deadline = None
        if self.writing_paused:
            # The answer before this request is still on its way to a slow reader.
            self._start_deadline(self._head_too_slow)
            return
        limit = f"{self._limits.receive_timeout:g} s (--http-receive-timeout)"
        self._refuse(Cause.SLOW_HEAD, 408, f"the request's head did not arrive within {limit}", "timeout")

    def _peer(self) -> str:
        name = None if self.transport is None else self.transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else "an unknown address"

    def _refuse(self, cause: Cause, status: int, message: str, code: str) -> None:
        """Answer without a request, and close."""
        if self.transport is None:
            return
        self._refusals.add(cause, self._peer(), message)
        body = error_body(message, code=code, type=_TYPES[status])
        phrase = http.HTTPStatus(status).phrase
        head = (
            f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{HEADER}: {new_request_id()}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.force_close()


_TYPES = {408: "invalid_request_error", 503: "service_unavailable"}


@web.middleware
async def watch_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost of an application whose connections are `BoundedProtocol`s: tells them what goes on."""
    protocol = request.protocol
    if not isinstance(protocol, BoundedProtocol):
        return await handler(request)
    with protocol.answering(request):
        return await handler(request)
