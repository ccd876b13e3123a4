"""`launch-local` with everything it starts: idle CPU, and kill -9 of the parent."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from support.client import Client
from support.cluster import MODEL
from support.processes import (
    Launched,
    command_line,
    cpu_seconds,
    eventually_no_processes,
    processes_of_this_run,
)

IDLE_SECONDS = float(os.environ.get("DIPTYCH_IDLE_SECONDS", "5"))


@pytest.fixture(scope="module")
def local() -> Iterator[Launched]:
    local = Launched("launch-local", "--model-path", MODEL, "--port", "0", "--max-total-tokens", "8192")
    try:
        yield local.ready()
    finally:
        local.kill()


def test_idle_processes_use_under_one_percent_of_a_core(local: Launched) -> None:
    """All of them, after they have served, over DIPTYCH_IDLE_SECONDS."""
    Client(local.url).ok("/v1/completions", {"prompt": "The sea", "max_tokens": 4, "temperature": 0})
    pids = processes_of_this_run()
    assert len(pids) == 6  # launch-local, router, two frontends, two schedulers
    before = {pid: cpu_seconds(pid) for pid in pids}
    time.sleep(IDLE_SECONDS)
    for pid, seconds in before.items():
        share = (cpu_seconds(pid) - seconds) / IDLE_SECONDS
        assert share < 0.01, f"{command_line(pid)!r} uses {share:.1%} of a core"


def test_kill_9_of_launch_local_ends_everything(local: Launched) -> None:
    assert len(processes_of_this_run()) == 6
    local.kill()
    assert eventually_no_processes() == []
