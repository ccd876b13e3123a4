"""One leg of an attempt: the POST to one worker, and the ways in which it can fail."""

from __future__ import annotations

import enum

import aiohttp
import msgspec

from diptych.router.errors import RouterError
from diptych.router.silence import SilenceWatch
from diptych.router.workers import Worker, connection_reason

MAX_ERROR_BODY = 1 << 20
"""Bytes of a worker's error answer that are read and relayed."""


class FailureKind(enum.StrEnum):
    CONNECT = "connect"
    """No connection: the request never reached the worker."""
    REFUSED = "refused"
    """503: the worker says that it did not take the request."""
    REJECTED = "rejected"
    """4xx: the client's fault; relayed as it is."""
    ERROR = "error"
    """Any other answer that isn't 2xx."""
    BROKEN = "broken"
    """The connection ended after the request was sent: the worker may have run it."""
    SILENT = "silent"
    """Nothing came for too long: the worker may be running it."""


class LegFailure(Exception):
    """A leg ended without doing its part."""

    def __init__(
        self,
        worker: Worker,
        kind: FailureKind,
        reason: str,
        *,
        status: int = 0,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(f"{worker}: {reason}")
        self.worker = worker
        self.kind = kind
        self.reason = reason
        self.status = status
        """The worker's HTTP status; 0 if it did not answer."""
        self.body = body
        self.headers = headers or {}

    @property
    def not_run(self) -> bool:
        """True when this worker provably did not run the request. Output needs both legs, so then no
        output can exist on either side and another attempt is safe."""
        return self.kind in (FailureKind.CONNECT, FailureKind.REFUSED)

    def as_error(self) -> RouterError:
        """What the client is told once there is nothing left to try."""
        if self.kind is FailureKind.REFUSED:
            return RouterError(503, str(self), code="worker_refused", retry_after=1)
        if self.kind is FailureKind.SILENT:
            return RouterError(504, str(self), code="timeout")
        status = 504 if self.status == 504 else 502
        code = "worker_unreachable" if self.kind is FailureKind.CONNECT else "worker_failed"
        return RouterError(status, str(self), code=code)

    @property
    def may_be_the_peers(self) -> bool:
        """True when the worker may only be telling what its peer did: 502 and 504 are how each side reports
        a transfer that failed, whoever failed it."""
        return self.kind is FailureKind.ERROR and self.status in (502, 504)


def silent(worker: Worker, seconds: float, flag: str) -> LegFailure:
    """Nothing came for so long; the worker is asked for its health at once."""
    worker.suspect()
    return LegFailure(worker, FailureKind.SILENT, f"sent nothing for {seconds:g} s ({flag})")


def relayed_headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    """The worker's headers that are the client's business."""
    names = ("Content-Type", "Content-Length", "Content-Encoding", "Cache-Control", "Retry-After")
    return {name: response.headers[name] for name in names if name in response.headers}


class Leg:
    """One POST: `open()`, `start()`, `read()` to the end. `close()` drops the connection at any point, which
    is how a worker learns to stop."""

    def __init__(
        self, session: aiohttp.ClientSession, worker: Worker, path: str, body: bytes, headers: dict[str, str]
    ) -> None:
        self.worker = worker
        self._session = session
        self._path = path
        self._body = body
        self._headers = headers
        self._response: aiohttp.ClientResponse | None = None
        self._open = False
        self._trial = False
        self._silence: SilenceWatch | None = None
        self._silent_for = 0.0

    def open(self) -> None:
        """From now on the request counts as the worker's, for those that pick workers in the meantime too."""
        self._open = True
        self._trial = self.worker.breaker.began()
        self.worker.begin(len(self._body))

    async def start(self) -> aiohttp.ClientResponse:
        """Send, and wait for a 2xx head. Raises LegFailure for anything else."""
        assert self._open, "open() comes first"
        try:
            response = await self._session.post(
                self.worker.url + self._path, data=self._body, headers=self._headers, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            reason = f"no connection ({connection_reason(error)})"
            self.worker.mark_down(reason)
            raise LegFailure(self.worker, FailureKind.CONNECT, reason) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(error) from error
        self._response = response
        if 200 <= response.status < 300:
            return response
        raise await self._failed_answer(response)

    def limit_silence(self, seconds: float) -> None:
        """From now on no wait for bytes may last longer."""
        if not self._open:  # the body has ended
            return

        def give_up() -> None:
            self._silent_for = seconds
            if self._response is not None:
                self._response.close()  # which ends the wait

        self._silence = SilenceWatch(seconds, give_up)

    async def read(self) -> bytes:
        """The next bytes of the body as they arrive; `b""` at its end. Raises LegFailure: BROKEN if the
        body is cut short, SILENT after a wait beyond the limit."""
        assert self._response is not None, "start() comes first"
        if self._silence is not None:
            self._silence.waiting()
        try:
            chunk = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            if self._silent_for:
                raise silent(self.worker, self._silent_for, "--stream-idle-timeout") from error
            raise self._broken(error) from error
        if self._silence is not None:
            self._silence.heard()
        if not chunk:
            if 200 <= self._response.status < 300:
                # Not sooner: a worker may begin every answer well and finish none.
                self.worker.breaker.succeeded()
            self.close()
        return chunk

    def close(self) -> None:
        """Give the connection back if the answer was read to its end, else drop it. Idempotent."""
        if not self._open:
            return
        self._open = False
        self.worker.end(len(self._body))
        self.worker.breaker.ended(self._trial)
        if self._silence is not None:
            self._silence.stop()
        if self._response is not None:
            self._response.close()

    def _broken(self, error: Exception) -> LegFailure:
        self.worker.suspect()
        reason = f"the connection broke ({connection_reason(error)})"
        return LegFailure(self.worker, FailureKind.BROKEN, reason)

    async def _failed_answer(self, response: aiohttp.ClientResponse) -> LegFailure:
        body = bytearray()
        while len(body) < MAX_ERROR_BODY and (chunk := await self.read()):
            body += chunk
        status = response.status
        if 400 <= status < 500:
            kind = FailureKind.REJECTED
        elif status == 503:
            kind = FailureKind.REFUSED
            self.worker.suspect()
        else:
            kind = FailureKind.ERROR
        headers = relayed_headers(response)
        headers.pop("Content-Length", None)  # aiohttp sets it from the body that is really sent
        reason = f"answered {status}: {error_message(bytes(body))}"
        return LegFailure(self.worker, kind, reason, status=status, body=bytes(body), headers=headers)


class _Detail(msgspec.Struct):
    message: str


class _ErrorAnswer(msgspec.Struct):
    error: _Detail


_error_decoder = msgspec.json.Decoder(_ErrorAnswer)


def error_message(body: bytes) -> str:
    """The sentence in a worker's error answer: `error.message` where it has that shape, else its start."""
    try:
        return _error_decoder.decode(body).error.message.rstrip(".")
    except msgspec.DecodeError:  # not JSON, or of another shape
        return body[:500].decode("utf-8", "replace").strip() or "(empty body)"
