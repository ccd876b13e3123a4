"""Rules for the whole suite."""

import os
import time
from collections.abc import Iterator

import pytest

# What a processor can't do is no gap in the suite; a missing compiler, model or service is.
HARDWARE = "this machine has no "

_skipped: list[str] = []

LEFT_FOR_SECONDS = 15.0
"""How long what belongs to a process may stay after its end."""
_left_before: set[str] = set()
_left_over: set[str] = set()


@pytest.fixture(scope="module", autouse=True)
def the_environment_is_put_back() -> Iterator[None]:
    """After each test file. A transfer library that runs in this process sets variables of its own, and
    workers that later files start would inherit them."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and HARDWARE not in str(report.longrepr):
        _skipped.append(report.nodeid)


def leftovers() -> set[str]:
    """Names that outlive a process. The workers' own sockets are abstract and go with the process."""
    temporary = {entry for entry in os.listdir("/tmp") if "diptych" in entry or "ucx" in entry.lower()}
    return {f"/dev/shm/{entry}" for entry in os.listdir("/dev/shm")} | {f"/tmp/{e}" for e in temporary}


def pytest_sessionstart(session: pytest.Session) -> None:
    _left_before.update(leftovers())


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """A run that leaves a segment or a file behind fails; on CI so does one that skipped a test."""
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that started this one sees the end of all
    deadline = time.monotonic() + LEFT_FOR_SECONDS
    while (left := leftovers() - _left_before) and time.monotonic() < deadline:
        time.sleep(0.2)
    _left_over.update(left)
    if _left_over or (os.environ.get("CI") and _skipped):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_over:
        names = ", ".join(sorted(_left_over))
        terminalreporter.write_line(f"left behind, so the run fails: {names}", red=True)
    if os.environ.get("CI") and _skipped:
        terminalreporter.write_line(f"skipped on CI, so the run fails: {', '.join(_skipped)}", red=True)
