"""Errors a client can see, in OpenAI's shape. Raised anywhere in the frontend; one middleware answers."""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """An answer other than success: `status` and the fields of OpenAI's error object."""

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = headers or {}
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        return msgspec.json.encode(self.body())


class BadRequest(ApiError):
    """The request is at fault; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(BadRequest):
    status = 401
    code = "invalid_api_key"


class Forbidden(BadRequest):
    """A key of ours, but not one for this route."""

    status = 403
    code = "insufficient_permissions"


class RequestTimeout(BadRequest):
    """The client took too long to send its request."""

    status = 408
    code = "timeout"


class ModelNotFound(BadRequest):
    status = 404
    code = "model_not_found"


class NotFound(BadRequest):
    status = 404
    code = "not_found"


class MethodNotAllowed(BadRequest):
    status = 405
    code = "method_not_allowed"


class BodyTooLarge(BadRequest):
    status = 413
    code = "request_too_large"


class TooManyRequests(ApiError):
    """The queue is full; clients of OpenAI's wait and try again."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Unavailable(ApiError):
    """The worker can't take or finish this now: it is stopping, or its scheduler is gone."""

    status = 503
    type = "service_unavailable"
    code = "service_unavailable"


class DeadlineExceeded(ApiError):
    status = 504
    type = "timeout_error"
    code = "timeout"


def engine_error(message: str, *, status: int, param: str | None) -> ApiError:
    """The error for a sample that the scheduler ended with kind `error`."""
    if status == 429:
        return TooManyRequests(message, headers={"Retry-After": "1"})
    if 400 <= status < 500:
        return BadRequest(message, status=status, param=param)
    if status in (502, 503):
        return Unavailable(message, status=status)
    if status == 504:
        return DeadlineExceeded(message)
    return ApiError(message, status=status if 500 <= status < 600 else 500, code="engine_error")
