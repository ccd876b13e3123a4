"""What stands open to other machines is said loudly, and nothing else is."""

from __future__ import annotations

import logging

import pytest

from diptych.common_config import override_config
from diptych.httpserver.exposure import is_loopback, open_http, warn

KEY = {"api_key": "a-key"}


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("worker-1", False),
        ("*", False),
    ],
)
def test_what_other_machines_can_reach(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("host", "keys", "words"),
    [
        ("127.0.0.1", {}, None),
        ("0.0.0.0", KEY, None),
        ("0.0.0.0", {}, "asks for no key"),
        ("::", {}, "HTTP on [::]:"),
        ("0.0.0.0", {"admin_api_key": "k"}, "asks for a key on administrative routes alone"),
    ],
)
def test_http_that_is_open(host: str, keys: dict[str, str], words: str | None) -> None:
    with override_config(host=host, **keys):
        lines = open_http(host)
    assert (words is None) == (lines == [])
    if words is not None:
        (line,) = lines
        assert words in line
        assert "--api-key" in line


def test_the_warning_is_one_of_several_lines(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test")
    warn(logger, [])
    assert caplog.records == []
    warn(logger, ["this", "that"])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "THIS SERVER IS OPEN TO OTHER MACHINES:\n  * this\n  * that"
