"""Which of two failures decides, and what a client is told."""

from __future__ import annotations

import pytest

from diptych.router.blame import prefer
from diptych.router.legs import FailureKind, LegFailure, error_message
from diptych.router.workers import Worker, WorkerRole

PREFILL = Worker(WorkerRole.PREFILL, "http://p:1")
DECODE = Worker(WorkerRole.DECODE, "http://d:1")


@pytest.mark.parametrize(
    ("prefill", "decode", "deciding"),
    [
        (FailureKind.REJECTED, FailureKind.REJECTED, DECODE),
        (FailureKind.REJECTED, FailureKind.ERROR, PREFILL),
        (FailureKind.REJECTED, FailureKind.CONNECT, PREFILL),
        (FailureKind.CONNECT, FailureKind.ERROR, PREFILL),
        (FailureKind.ERROR, FailureKind.REFUSED, DECODE),
        (FailureKind.ERROR, FailureKind.BROKEN, DECODE),
    ],
)
def test_the_deciding_failure(prefill, decode, deciding):
    failures = [LegFailure(PREFILL, prefill, "p"), LegFailure(DECODE, decode, "d")]
    assert prefer(failures).worker is deciding
    assert prefer(failures[::-1]).worker is deciding


@pytest.mark.parametrize(
    ("kind", "answered", "status"),
    [
        (FailureKind.CONNECT, None, 502),
        (FailureKind.REFUSED, 503, 503),
        (FailureKind.ERROR, 500, 502),
        (FailureKind.ERROR, 504, 504),
        (FailureKind.BROKEN, None, 502),
    ],
)
def test_the_status_a_client_sees(kind, answered, status):
    error = LegFailure(DECODE, kind, "why", status=answered).as_error()
    assert error.status == status
    assert error.message == "decode worker http://d:1: why"


def test_only_failures_before_a_worker_took_the_request_are_safe_to_try_again():
    safe = {kind for kind in FailureKind if LegFailure(DECODE, kind, "").not_run}
    assert safe == {FailureKind.CONNECT, FailureKind.REFUSED}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "bad thing", "type": "x"}}', "bad thing"),
        (b'{"detail": "other shape"}', '{"detail": "other shape"}'),
        (b"plain \xff text", "plain \ufffd text"),
        (b"", "(empty body)"),
    ],
)
def test_a_workers_reason_is_found_in_any_body(body, message):
    assert error_message(body) == message
