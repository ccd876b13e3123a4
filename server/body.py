"""From the bytes of a request body to a typed struct, or to a 4xx that names the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from aiohttp import web

from diptych.common_config import get_serving
from diptych.httpserver.json_fault import json_fault
from diptych.server.errors import BadRequest, BodyTooLarge

T = TypeVar("T")

_AT_PATH = re.compile(r"^(?P<what>.*) - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")


async def read_body(request: web.Request) -> bytes:
    """Raises `BodyTooLarge` (413), before reading when the length is announced."""
    limit: int = get_serving().max_request_bytes
    too_large = f"the request body is larger than {limit} bytes (--max-request-bytes)"
    if request.content_length is not None and request.content_length > limit:
        raise BodyTooLarge(too_large)
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise BodyTooLarge(too_large) from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the request body could not be read: {error}") from None


async def read_json(request: web.Request, kind: type[T]) -> T:
    return decode_json(await read_body(request), kind)


async def read_optional_json(request: web.Request, kind: type[T]) -> T:
    """For a body whose every field may be left out: none at all is `kind()`."""
    body = await read_body(request)
    return decode_json(body, kind) if body.strip() else kind()


def decode_json(data: bytes, kind: type[T]) -> T:
    """Raises `BadRequest` for invalid UTF-8, malformed JSON and wrong types."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body {json_fault(data, error)}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def convert(given: object, kind: type[T], param: str) -> T:
    """A part of a body that was decoded before. Raises `BadRequest` naming the place inside `param`."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), param) from None


def _field_error(text: str, inside: str = "") -> BadRequest:
    found = _AT_PATH.match(text)
    what, path = (found["what"], inside + found["path"]) if found else (text, inside)
    path = path.lstrip(".")
    if found and found["key"]:
        what += " (in a key)"
    missing = _MISSING.search(what)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
    where = f"`{path}`: " if path else ""
    return BadRequest(f"{where}{what}", param=path or None)
