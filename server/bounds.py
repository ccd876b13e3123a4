"""Bounds of request fields, for the document. msgspec doesn't check them: the handlers do, with messages
of their own, and `tests/unit/server/test_bounds.py` compares."""

from __future__ import annotations

from msgspec import Meta

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 1024
MAX_RID_LENGTH = 256
MAX_TOP_LOGPROBS = 20
"""On the OpenAI routes, as theirs."""
MAX_NATIVE_LOGPROBS = 128
"""On /generate."""
LEAST_OUTPUT = 16
"""OpenAI's own bound for `max_output_tokens`."""


def within(low: float, high: float | None = None, *, above: bool = False) -> Meta:
    """[low, high], or (low, high] with `above`."""
    bounds = {"exclusiveMinimum" if above else "minimum": low}
    return Meta(extra_json_schema=bounds if high is None else bounds | {"maximum": high})


def long(low: int, high: int) -> Meta:
    """Characters of a text."""
    return Meta(extra_json_schema={"minLength": low, "maxLength": high})


def many(low: int, high: int | None = None) -> Meta:
    """Entries of a list."""
    return Meta(extra_json_schema={"minItems": low} | ({} if high is None else {"maxItems": high}))


def one_of(*texts: str) -> Meta:
    return Meta(extra_json_schema={"enum": list(texts)})


TOKEN_KEYS = Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}})
"""Of an object that is keyed by token ids."""
