"""OpenAI's error object, for errors that arise below the routes of a worker or the router."""

from __future__ import annotations

import json


def error_body(message: str, *, type: str = "invalid_request_error", code: str | None = None) -> bytes:
    """`{"error": {message, type, param, code}}`; no field is at fault."""
    return json.dumps({"error": {"message": message, "type": type, "param": None, "code": code}}).encode()
