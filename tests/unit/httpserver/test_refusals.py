"""A flood is counted whole, and logged in a few lines."""

from __future__ import annotations

import logging

import pytest

from diptych.httpserver.refusals import Cause, Refusals
from diptych.httpserver.throttle import QUIET_SECONDS


def test_each_is_counted_and_one_in_a_while_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    now, counted = [0.0], []
    refusals = Refusals(logging.getLogger("test"), counted.append, lambda: now[0])
    refusals.add(Cause.MALFORMED, "10.0.0.1", "no HTTP")
    for _ in range(100):
        refusals.add(Cause.TOO_MANY, "10.0.0.1", "too many")
    assert len(counted) == 101
    (line,) = caplog.records
    assert line.getMessage() == "refused a connection from 10.0.0.1: too many"
    now[0] += QUIET_SECONDS
    refusals.add(Cause.SLOW_HEAD, "10.0.0.2", "slow")
    assert "10.0.0.2 (and 99 others" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 2
