"""Work off the scheduler's thread."""

from __future__ import annotations

import select

import pytest

from diptych.engine.background import BackgroundPool


def test_work_that_breaks_wakes_the_loop_and_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        raise RuntimeError("out of luck")

    pool = BackgroundPool(threads=1, name="test")
    pool.submit(work)
    assert select.select([pool.wakeup], [], [], 5)[0]
    pool.close()
    assert "out of luck" in caplog.text
