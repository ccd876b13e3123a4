"""Servers under test are waited for, and ended whatever happens."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from diptych.bench.servers import ServerFailed, running_server, server_command

READY = "print('loading', flush=True); print('ready: http://x (pid %d)' % os.getpid(), flush=True)"
FOREVER = "import signal; signal.pause()"


def python(*statements):
    return [sys.executable, "-c", "import os, subprocess, sys, time\n" + "\n".join(statements)]


def pids(log):
    return [int(word.rstrip(")")) for word in log.read_text().replace(")", " ").split() if word.isdigit()]


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_server_runs_until_the_block_ends(tmp_path):
    log = tmp_path / "log"
    with running_server(python(READY, FOREVER), log) as seconds:
        (pid,) = pids(log)
        os.kill(pid, 0)
        assert 0 < seconds < 10
    assert gone(pid)
    assert log.read_text().startswith("loading\n")


def test_a_server_is_ended_when_the_block_raises(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(ZeroDivisionError), running_server(python(READY, FOREVER), log):
        raise ZeroDivisionError
    (pid,) = pids(log)
    assert gone(pid)


def test_children_that_a_server_leaves_behind_are_ended_too(tmp_path):
    log = tmp_path / "log"
    child = (
        f"c = subprocess.Popen([sys.executable, '-c', {FOREVER!r}]); print('(child', c.pid, ')', flush=True)"
    )
    with running_server(python(child, READY, FOREVER), log):
        child_pid, pid = pids(log)
    assert gone(pid)
    psutil.wait_procs([psutil.Process(child_pid)] if psutil.pid_exists(child_pid) else [], timeout=3)
    assert gone(child_pid)


def test_a_server_that_ends_before_it_is_ready_shows_its_log(tmp_path):
    command = python("print('no such model', flush=True)", "sys.exit(3)")
    with (
        pytest.raises(ServerFailed, match=r"exit code 3\nno such model"),
        running_server(command, tmp_path / "log"),
    ):
        pass


def test_a_server_that_is_never_ready_is_given_up(tmp_path):
    log = tmp_path / "log"
    command = python("print('pid', os.getpid(), flush=True)", FOREVER)
    with pytest.raises(ServerFailed, match=r"0\.5 s"), running_server(command, log, ready_timeout=0.5):
        pass
    for pid in pids(log):
        assert gone(pid)


def test_an_unknown_script_is_a_clear_error():
    with pytest.raises(FileNotFoundError, match="launch-nothing"):
        server_command("launch-nothing", "m", 1, [])
