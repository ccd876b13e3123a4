"""Rules for the whole suite."""

import os
from collections.abc import Iterator

import pytest

# What a processor can't do is no gap in the suite; a missing compiler, model or service is.
HARDWARE = "this machine has no "

_skipped: list[str] = []


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


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """On CI a test that should run and was skipped fails the run."""
    yield
    if os.environ.get("CI") and _skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") and _skipped:
        terminalreporter.write_line(f"skipped on CI, so the run fails: {', '.join(_skipped)}", red=True)
