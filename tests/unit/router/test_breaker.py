"""A worker's circuit breaker, and who is charged for a failed attempt."""

from __future__ import annotations

import pytest

from diptych.common_config import Program, Role, parse_command_line, publish
from diptych.router.blame import guilty, prefer
from diptych.router.breaker import BreakerState, CircuitBreaker
from diptych.router.legs import FailureKind, LegFailure
from diptych.router.workers import Worker, WorkerRole

PREFILL = Worker(WorkerRole.PREFILL, "http://p:1")
DECODE = Worker(WorkerRole.DECODE, "http://d:1")
BOTH = [DECODE, PREFILL]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def publish_router(*flags):
    publish(parse_command_line(Program.ROUTER, flags), role=Role.ROUTER)


@pytest.fixture
def breaker(clock):
    publish_router("--breaker-failures", "3", "--breaker-cooldown", "10")
    return CircuitBreaker("w", clock)


def opened(breaker):
    for _ in range(3):
        breaker.failed()
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_it_opens_after_failures_in_a_row_only(breaker):
    for _ in range(10):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    opened(breaker)
    assert not breaker.passes


def test_after_the_cooldown_one_request_tries_and_its_success_closes_it(breaker, clock):
    opened(breaker)
    clock.now += 9.9
    assert not breaker.passes
    clock.now += 0.2
    assert breaker.passes
    assert breaker.began() is True
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.passes
    assert breaker.began() is False  # sent for lack of another worker: not the one that tries
    breaker.succeeded()
    breaker.ended(True)
    assert breaker.state is BreakerState.CLOSED
    breaker.failed()
    assert breaker.passes  # counted from nothing again


def test_a_trial_that_fails_starts_the_cooldown_anew(breaker, clock):
    opened(breaker)
    clock.now += 10
    breaker.began()
    breaker.failed()
    breaker.ended(True)
    assert breaker.state is BreakerState.OPEN
    clock.now += 9.9
    assert not breaker.passes


def test_a_trial_that_says_nothing_makes_room_for_another_at_once(breaker, clock):
    opened(breaker)
    clock.now += 10
    breaker.began()
    breaker.ended(True)  # its client left
    assert breaker.passes
    assert breaker.began() is True


def test_a_success_that_was_under_way_closes_it(breaker):
    opened(breaker).succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_a_worker_that_comes_back_up_begins_anew(breaker):
    opened(breaker).recovered()
    breaker.failed()
    assert breaker.state is BreakerState.CLOSED


def test_minus_1_turns_it_off(clock):
    publish_router("--breaker-failures", "-1")
    breaker = CircuitBreaker("w", clock)
    for _ in range(100):
        breaker.failed()
    assert breaker.state is BreakerState.CLOSED


def failure(worker, kind, status=0):
    return LegFailure(worker, kind, "r", status=status)


@pytest.mark.parametrize(
    ("failures", "charged"),
    [
        # A report of a failed transfer beside a broken connection: the one that broke is guilty.
        ([failure(DECODE, FailureKind.ERROR, 502), failure(PREFILL, FailureKind.BROKEN)], [PREFILL]),
        ([failure(DECODE, FailureKind.BROKEN), failure(PREFILL, FailureKind.ERROR, 502)], [DECODE]),
        ([failure(DECODE, FailureKind.ERROR, 504), failure(PREFILL, FailureKind.CONNECT)], [PREFILL]),
        ([failure(DECODE, FailureKind.ERROR, 502), failure(PREFILL, FailureKind.ERROR, 500)], [PREFILL]),
        # Nothing but such reports: either may have done it.
        ([failure(DECODE, FailureKind.ERROR, 502)], BOTH),
        ([failure(DECODE, FailureKind.ERROR, 502), failure(PREFILL, FailureKind.ERROR, 504)], BOTH),
        # Own errors.
        ([failure(DECODE, FailureKind.ERROR, 500)], [DECODE]),
        ([failure(DECODE, FailureKind.SILENT), failure(PREFILL, FailureKind.SILENT)], BOTH),
        # The client's fault, or a full worker, and what follows from it.
        ([failure(DECODE, FailureKind.REJECTED, 400)], []),
        ([failure(DECODE, FailureKind.ERROR, 502), failure(PREFILL, FailureKind.REJECTED, 400)], []),
        ([failure(DECODE, FailureKind.REFUSED, 503)], []),
        ([failure(DECODE, FailureKind.ERROR, 502), failure(PREFILL, FailureKind.REFUSED, 503)], []),
        ([failure(DECODE, FailureKind.BROKEN), failure(PREFILL, FailureKind.REFUSED, 503)], [DECODE]),
    ],
)
def test_who_is_charged(failures, charged):
    assert guilty(failures, BOTH) == charged


def test_the_client_reads_the_cause_rather_than_the_report_of_it():
    report, cause = failure(DECODE, FailureKind.ERROR, 502), failure(PREFILL, FailureKind.ERROR, 500)
    assert prefer([report, cause]) is cause
    assert prefer([report, failure(PREFILL, FailureKind.ERROR, 502)]) is report


def test_a_prefill_that_has_done_its_part_is_no_suspect():
    assert guilty([failure(DECODE, FailureKind.ERROR, 502)], [DECODE]) == [DECODE]
