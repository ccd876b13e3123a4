"""`kill -9`, stops, restarts and garbage: only the rooms of that peer fail, and the next one works."""

from __future__ import annotations

import http.client
import itertools
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from .conftest import FAST, TRANSPORTS, Process, Workers, start_room, transfer

HEARTBEATS_S = 2 * FAST["heartbeat_interval"]
SLACK_S = 1.0
"""For a loaded machine to notice."""
SRC = list(range(40))

rooms = itertools.count(1)


class Pair:
    """Two workers that every test leaves serving; who was killed has a successor."""

    def __init__(self, workers: Workers, name: str) -> None:
        self.workers, self.options = workers, TRANSPORTS[name]
        self.prefill, self.decode = self.start("prefill"), self.start("decode")
        self.prefill.do("fill", pages=list(range(64)), seed=1)

    def start(self, role: str, **ports: int) -> Process:
        return self.workers.start(role, **self.options, **ports)

    def start_another(self, role: str, **ports: int) -> Process:
        """One that is ready: no room's deadline runs while it starts."""
        worker = self.start(role, **ports)
        assert worker.control
        return worker

    @property
    def whole(self) -> bool:
        return self.prefill.process.poll() is None and self.decode.process.poll() is None

    def assert_serves(self, src: list[int], dst: list[int]) -> None:
        transfer(self.prefill, self.decode, next(rooms), src, dst)
        assert_pages_equal(self.prefill, self.decode, src, dst)


@pytest.fixture(scope="module")
def pair_of(shared_workers: Workers) -> Iterator[Callable[[str], Pair]]:
    """The pair of a transport, started when first asked for."""
    pairs: dict[str, Pair] = {}

    def pair_of(name: str) -> Pair:
        if name not in pairs or not pairs[name].whole:
            pairs[name] = Pair(shared_workers, name)
        return pairs[name]

    yield pair_of
    for pair in pairs.values():
        assert (pair.prefill.stop(), pair.decode.stop()) == (0, 0)


every_transport = pytest.mark.parametrize("transport", TRANSPORTS)
every_backend = pytest.mark.parametrize("transport", ["nixl", "mooncake"])


def failed_since(worker: Process, room: int, at: float) -> dict[str, object]:
    event = worker.wait("Failed", room)
    assert event["at"] - at < HEARTBEATS_S + SLACK_S
    return event


def assert_pages_equal(prefill: Process, decode: Process, src: list[int], dst: list[int]) -> None:
    assert decode.do("pages", pages=dst) == prefill.do("pages", pages=src)


@every_backend
def test_aborts_on_both_sides_before_and_during(pair_of: Callable[[str], Pair], transport: str) -> None:
    pair = pair_of(transport)
    prefill, decode = pair.prefill, pair.decode
    for aborting, other in ((decode, prefill), (prefill, decode)):
        room = next(rooms)
        start_room(prefill, decode, room, [room], 16)
        aborting.do("abort", room=room, reason="enough")
        assert other.wait("Failed", room)["reason"] == "enough"
        decode.wait("Drained", room)
    for aborting, other in ((decode, prefill), (prefill, decode)):
        room = next(rooms)
        start_room(prefill, decode, room, SRC, 640)
        prefill.do("send", room=room, src_pages=SRC, first_page_index=0)
        aborting.do("abort", room=room, reason="enough")
        assert other.wait("Failed", room)["reason"] == "enough"
        decode.wait("Drained", room)
    pair.assert_serves([1, 2], [3, 4])
    assert decode.metric("quarantined_pages") == 0
    for worker in (prefill, decode):
        assert worker.do("idle") == [False, None]


def test_garbage_on_the_control_and_bootstrap_ports_changes_nothing(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("nixl")
    prefill, decode = pair.prefill, pair.decode
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
    pair.assert_serves([1, 2], [3, 4])


@every_backend
def test_stopped_prefill_is_noticed_and_its_pages_stay_quarantined_until_it_answers(
    pair_of: Callable[[str], Pair], transport: str
) -> None:
    pair = pair_of(transport)
    prefill, decode = pair.prefill, pair.decode
    room = next(rooms)
    start_room(prefill, decode, room, [1, 2], 32)
    prefill.signal(signal.SIGSTOP)
    at = time.monotonic()
    failed_since(decode, room, at)
    time.sleep(2 * HEARTBEATS_S)  # long enough to ask and to probe: a stop proves nothing
    assert not decode.saw("Drained", room)
    prefill.signal(signal.SIGCONT)
    decode.wait("Drained", room)
    prefill.wait("Failed", room)
    pair.assert_serves([1, 2], [3, 4])


@pytest.mark.parametrize("transport", ["nixl-tcp", "mooncake"])  # the kernel copies into a stopped process
def test_stopped_decode_is_noticed_and_serves_again_once_it_runs(
    pair_of: Callable[[str], Pair], transport: str
) -> None:
    pair = pair_of(transport)
    prefill, decode = pair.prefill, pair.decode
    pair.assert_serves([1, 2], [3, 4])
    room = next(rooms)
    start_room(prefill, decode, room, SRC, 640)
    decode.signal(signal.SIGSTOP)
    prefill.do("send", room=room, src_pages=SRC, first_page_index=0)
    event = failed_since(prefill, room, time.monotonic())
    assert event["drained"] is False
    decode.signal(signal.SIGCONT)
    decode.wait("Failed", room)
    prefill.wait("Drained", room)
    decode.wait("Drained", room)
    pair.assert_serves([1, 2], [5, 6])


@every_transport
def test_killed_prefill_fails_its_rooms_only_and_a_restart_on_its_ports_serves(
    pair_of: Callable[[str], Pair], transport: str
) -> None:
    pair = pair_of(transport)
    prefill, decode = pair.prefill, pair.decode
    other = pair.start_another("prefill")
    pair.assert_serves([1, 2], [3, 4])
    elsewhere, sent, agreed = (next(rooms) for _ in range(3))
    start_room(other, decode, elsewhere, [50, 51], 32)
    start_room(prefill, decode, sent, SRC, 640)
    decode.do("open", room=agreed, host="127.0.0.1", port=prefill.bootstrap)
    decode.wait("HandshakeDone", agreed)
    prefill.do("send", room=sent, src_pages=SRC, first_page_index=0)
    prefill.kill()
    at = time.monotonic()
    assert failed_since(decode, sent, at)["drained"] is False
    assert failed_since(decode, agreed, at)["drained"] is True
    decode.wait("Drained", sent)
    assert not decode.saw("Failed", elsewhere)
    other.do("send", room=elsewhere, src_pages=[1, 2], first_page_index=0)
    other.do("finish", room=elsewhere, tokens=32)
    decode.wait("Received", elsewhere)
    assert other.stop() == 0

    pair.prefill = pair.start_another("prefill", port=prefill.control_port, bootstrap=prefill.bootstrap)
    pair.prefill.do("fill", pages=list(range(64)), seed=2)
    pair.assert_serves([8, 9, 1], [11, 12, 13])


@every_transport
def test_killed_decode_fails_its_rooms_at_prefill_only(
    pair_of: Callable[[str], Pair], transport: str
) -> None:
    pair = pair_of(transport)
    prefill, decode = pair.prefill, pair.decode
    other = pair.start_another("decode")
    pair.assert_serves([1, 2], [3, 4])
    elsewhere, sent, reserved = (next(rooms) for _ in range(3))
    start_room(prefill, other, elsewhere, [50, 51], 32)
    start_room(prefill, decode, sent, SRC, 640)
    start_room(prefill, decode, reserved, [60], 16)
    prefill.do("send", room=sent, src_pages=SRC, first_page_index=0)
    decode.kill()
    at = time.monotonic()
    for room in (sent, reserved):
        event = failed_since(prefill, room, at)
        if not event["drained"]:
            prefill.wait("Drained", room)
    prefill.do("send", room=elsewhere, src_pages=[5, 6], first_page_index=0)
    prefill.do("finish", room=elsewhere, tokens=32)
    other.wait("Received", elsewhere)
    assert_pages_equal(prefill, other, [5, 6], [50, 51])
    assert other.stop() == 0

    pair.decode = pair.start_another("decode", port=decode.control_port)
    pair.assert_serves([8, 9], [11, 12])
