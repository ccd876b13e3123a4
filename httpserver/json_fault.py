"""What is wrong with a body that no JSON decoder takes, in words that help its sender."""

from __future__ import annotations

import re

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(
    rb"(?<!\\)(?:\\\\)*+(?P<half>" + _HIGH + rb"(?!" + _LOW + rb")|(?<!" + _HIGH + rb")" + _LOW + rb")"
)
"""One of the two escapes that make a character together, without the other."""


def json_fault(data: bytes, error: Exception) -> str:
    """To be said of the body `data`, which is UTF-8: `error` is the decoder's, which for half a character
    may only say that something is missing."""
    if not data.strip():
        return "is empty; a JSON object is expected"
    half = _HALF.search(data)
    if half is None:
        return f"is not valid JSON: {error}"
    return (
        f"is not valid JSON: {half['half'].decode()} (byte {half.start('half')}) is half a surrogate pair, "
        "which is no character"
    )
