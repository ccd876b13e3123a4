"""What goes wrong in the router, and how each case looks to a client: OpenAI's error shape."""

from __future__ import annotations

import msgspec
from aiohttp import web

_SERVER_TYPES = {502: "service_unavailable", 503: "service_unavailable", 504: "timeout_error"}


def error_type(status: int) -> str:
    """The `type` beside an HTTP status, as the workers have it."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else _SERVER_TYPES.get(status, "internal_error")


def error_payload(status: int, message: str, code: str | None = None, param: str | None = None) -> bytes:
    """The JSON body `{"error": {message, type, param, code}}`."""
    return msgspec.json.encode(
        {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}
    )


class RouterError(Exception):
    """Ends a request with `status` and a sentence for the client.

    `retry_after` (seconds) becomes the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        """The request's field that is at fault; workers judge most of them."""
        self.retry_after = retry_after
        self.headers = headers or {}

    def payload(self) -> bytes:
        return error_payload(self.status, self.message, self.code, self.param)

    def event(self, number: int) -> bytes:
        """The JSON of the event by which a stream of `/v1/responses` says that it failed; `number` is its
        place among the stream's events."""
        return msgspec.json.encode(
            {
                "type": "error",
                "code": self.code,
                "message": self.message,
                "param": self.param,
                "sequence_number": number,
            }
        )

    def response(self) -> web.Response:
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        return web.Response(
            status=self.status, body=self.payload(), content_type="application/json", headers=headers
        )


def too_large(limit: int) -> RouterError:
    """`limit`: the largest body in bytes."""
    message = f"the request body is larger than {limit} bytes (--max-request-bytes)"
    return RouterError(413, message, code="request_too_large")


def from_http_exception(error: web.HTTPException, method: str, path: str, limit: int) -> RouterError:
    """aiohttp's own refusals in the shape clients parse. `limit`: the largest body in bytes."""
    if error.status == 404:
        return RouterError(404, f"no route {method} {path}", code="not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{path} does not answer {method}, but {allowed}"
        return RouterError(405, message, code="method_not_allowed")
    if error.status == 413:
        return too_large(limit)
    return RouterError(error.status, error.reason)
