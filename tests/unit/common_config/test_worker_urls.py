"""A worker's URL has one spelling: the same worker is never known twice."""

from __future__ import annotations

import pytest

from diptych.common_config import parse_worker_url


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("http://a:1/", "http://a:1"),
        ("HTTP://Worker-1.Example:30000", "http://worker-1.example:30000"),
        ("https://a:443", "https://a"),
        ("http://a:80/", "http://a"),
        ("http://a:443", "http://a:443"),
        ("http://[FE80::1]:030000", "http://[fe80::1]:30000"),
    ],
)
def test_the_one_spelling(given: str, kept: str) -> None:
    assert parse_worker_url((given,)) == kept
    assert parse_worker_url((kept,)) == kept
