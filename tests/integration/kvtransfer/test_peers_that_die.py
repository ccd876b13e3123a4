"""`kill -9`, stops, restarts and garbage: only the rooms of that peer fail, and the next one works."""

from __future__ import annotations

import http.client
import signal
import socket
import time
from typing import Any

import pytest

from .conftest import FAST, TRANSPORTS, Process, Workers, start_room, transfer

HEARTBEATS_S = 2 * FAST["heartbeat_interval"]
SLACK_S = 1.0
"""For a loaded machine to notice."""


@pytest.fixture(params=TRANSPORTS.values(), ids=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every way that pages can take."""
    return dict(request.param)


@pytest.fixture(params=["nixl", "mooncake"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def start_pair(workers: Workers, **options: Any) -> tuple[Process, Process]:
    prefill = workers.start("prefill", **options)
    decode = workers.start("decode", **options)
    prefill.do("fill", pages=list(range(64)), seed=1)
    return prefill, decode


def failed_since(worker: Process, room: int, at: float) -> dict[str, object]:
    event = worker.wait("Failed", room)
    assert event["at"] - at < HEARTBEATS_S + SLACK_S
    return event


def assert_pages_equal(prefill: Process, decode: Process, src: list[int], dst: list[int]) -> None:
    assert decode.do("pages", pages=dst) == prefill.do("pages", pages=src)


def test_killed_prefill_fails_its_rooms_only_and_a_restart_on_its_ports_serves(
    workers: Workers, transport: dict[str, Any]
) -> None:
    prefill, decode = start_pair(workers, **transport)
    other = workers.start("prefill", **transport)
    transfer(prefill, decode, 1, [1, 2], [3, 4])
    start_room(other, decode, 2, [50, 51], 32)
    start_room(prefill, decode, 3, list(range(40)), 640)
    decode.do("open", room=4, host="127.0.0.1", port=prefill.bootstrap)
    decode.wait("HandshakeDone", 4)
    prefill.do("send", room=3, src_pages=list(range(40)), first_page_index=0)
    control, bootstrap = prefill.control_port, prefill.bootstrap
    prefill.kill()
    at = time.monotonic()
    assert failed_since(decode, 3, at)["drained"] is False
    assert failed_since(decode, 4, at)["drained"] is True
    decode.wait("Drained", 3)
    assert not decode.saw("Failed", 2)
    other.do("send", room=2, src_pages=[1, 2], first_page_index=0)
    other.do("finish", room=2, tokens=32)
    decode.wait("Received", 2)

    again = workers.start("prefill", **transport, port=control, bootstrap=bootstrap)
    again.do("fill", pages=list(range(64)), seed=2)
    transfer(again, decode, 5, [8, 9, 1], [11, 12, 13])
    assert_pages_equal(again, decode, [8, 9, 1], [11, 12, 13])
    for worker in (again, decode, other):
        assert worker.stop() == 0


def test_killed_decode_fails_its_rooms_at_prefill_only(workers: Workers, transport: dict[str, Any]) -> None:
    prefill, decode = start_pair(workers, **transport)
    other = workers.start("decode", **transport)
    transfer(prefill, decode, 1, [1, 2], [3, 4])
    start_room(prefill, other, 2, [50, 51], 32)
    start_room(prefill, decode, 3, list(range(40)), 640)
    start_room(prefill, decode, 4, [60], 16)
    prefill.do("send", room=3, src_pages=list(range(40)), first_page_index=0)
    control = decode.control_port
    decode.kill()
    at = time.monotonic()
    for room in (3, 4):
        event = failed_since(prefill, room, at)
        if not event["drained"]:
            prefill.wait("Drained", room)
    prefill.do("send", room=2, src_pages=[5, 6], first_page_index=0)
    prefill.do("finish", room=2, tokens=32)
    other.wait("Received", 2)
    assert_pages_equal(prefill, other, [5, 6], [50, 51])
    again = workers.start("decode", **transport, port=control)
    transfer(prefill, again, 5, [8, 9], [11, 12])
    assert_pages_equal(prefill, again, [8, 9], [11, 12])
    assert prefill.stop() == 0


def test_stopped_prefill_is_noticed_and_its_pages_stay_quarantined_until_it_answers(
    workers: Workers, backend: str
) -> None:
    prefill, decode = start_pair(workers, backend=backend)
    start_room(prefill, decode, 1, [1, 2], 32)
    prefill.signal(signal.SIGSTOP)
    at = time.monotonic()
    failed_since(decode, 1, at)
    time.sleep(2 * HEARTBEATS_S)  # long enough to ask and to probe: a stop proves nothing
    assert not decode.saw("Drained", 1)
    prefill.signal(signal.SIGCONT)
    decode.wait("Drained", 1)
    prefill.wait("Failed", 1)
    transfer(prefill, decode, 2, [1, 2], [3, 4])
    assert_pages_equal(prefill, decode, [1, 2], [3, 4])
    assert prefill.stop() == 0
    assert decode.stop() == 0


@pytest.mark.parametrize("name", ["nixl-tcp", "mooncake"])  # the kernel copies into a stopped process
def test_stopped_decode_is_noticed_and_serves_again_once_it_runs(workers: Workers, name: str) -> None:
    prefill, decode = start_pair(workers, **TRANSPORTS[name])
    transfer(prefill, decode, 1, [1, 2], [3, 4])
    start_room(prefill, decode, 2, list(range(40)), 640)
    decode.signal(signal.SIGSTOP)
    prefill.do("send", room=2, src_pages=list(range(40)), first_page_index=0)
    event = failed_since(prefill, 2, time.monotonic())
    assert event["drained"] is False
    decode.signal(signal.SIGCONT)
    decode.wait("Failed", 2)
    prefill.wait("Drained", 2)
    decode.wait("Drained", 2)
    transfer(prefill, decode, 3, [1, 2], [5, 6])
    assert_pages_equal(prefill, decode, [1, 2], [5, 6])
    assert prefill.stop() == 0
    assert decode.stop() == 0


def test_aborts_on_both_sides_before_and_during(workers: Workers, backend: str) -> None:
    prefill, decode = start_pair(workers, backend=backend)
    for room, aborting, other in ((1, decode, prefill), (2, prefill, decode)):
        start_room(prefill, decode, room, [room], 16)
        aborting.do("abort", room=room, reason="enough")
        assert other.wait("Failed", room)["reason"] == "enough"
        decode.wait("Drained", room)
    for room, aborting, other in ((3, decode, prefill), (4, prefill, decode)):
        start_room(prefill, decode, room, list(range(40)), 640)
        prefill.do("send", room=room, src_pages=list(range(40)), first_page_index=0)
        aborting.do("abort", room=room, reason="enough")
        assert other.wait("Failed", room)["reason"] == "enough"
        decode.wait("Drained", room)
    transfer(prefill, decode, 1, [1, 2], [3, 4])
    assert_pages_equal(prefill, decode, [1, 2], [3, 4])
    assert decode.metric("quarantined_pages") == 0
    for worker in (prefill, decode):
        assert worker.do("idle") == [False, None]
        assert worker.stop() == 0


def test_garbage_on_the_control_and_bootstrap_ports_changes_nothing(workers: Workers) -> None:
    prefill, decode = start_pair(workers)
    for port in (prefill.control_port, decode.control_port, prefill.bootstrap):
        for junk in (b"", b"\x00" * 5000, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(junk)
    for method, path, body, status in (
        ("PUT", "/route", b"not json", 400),
        ("PUT", "/route", b"{}", 400),
        ("PUT", "/route", b"\xff\xfe", 400),
        ("PUT", "/route", b"[" * 100_000, 400),
        ("PUT", "/route", b"x" * (2 << 20), 413),
        ("POST", "/route", b"", 405),
        ("GET", "/nothing", None, 404),
        ("GET", "/health", None, 200),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", prefill.bootstrap, timeout=5)
        connection.request(method, path, body)
        answer = connection.getresponse()
        assert answer.status == status, (method, path, answer.read())
        assert answer.read().startswith(b"{")
        connection.close()
    transfer(prefill, decode, 1, [1, 2], [3, 4])
    assert_pages_equal(prefill, decode, [1, 2], [3, 4])
