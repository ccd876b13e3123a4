"""Real pages between real processes over NIXL and Mooncake on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .conftest import TRANSPORTS, Process, Workers, cpu_shares, start_room, transfer


@pytest.fixture(params=TRANSPORTS.values(), ids=TRANSPORTS, scope="module")
def pair(request: pytest.FixtureRequest, shared_workers: Workers) -> Iterator[tuple[Process, Process]]:
    prefill = shared_workers.start("prefill", **request.param)
    decode = shared_workers.start("decode", **request.param)
    prefill.do("fill", pages=list(range(64)), seed=1)
    yield prefill, decode
    assert (prefill.stop(), decode.stop()) == (0, 0)


def test_pages_arrive_bit_exact_and_adjacent_ones_share_a_descriptor(pair: tuple[Process, Process]) -> None:
    prefill, decode = pair
    before = {name: prefill.metric(name) for name in ("descriptors_total", "bytes_total")}
    received_before = decode.metric("pages_received_total")
    transfer(prefill, decode, 1, list(range(10, 42)), list(range(20, 52)))
    assert decode.do("pages", pages=list(range(20, 52))) == prefill.do("pages", pages=list(range(10, 42)))
    assert prefill.metric("descriptors_total") - before["descriptors_total"] == 1
    src, dst = [3, 4, 9, 1, 60], [7, 8, 3, 5, 63]
    transfer(prefill, decode, 2, src, dst)
    assert decode.do("pages", pages=dst) == prefill.do("pages", pages=src)
    assert prefill.metric("descriptors_total") - before["descriptors_total"] == 5
    assert prefill.metric("bytes_total") - before["bytes_total"] == 37 * 368_640
    assert decode.metric("pages_received_total") - received_before == 37


def test_chunks_of_interleaved_rooms_arrive(pair: tuple[Process, Process]) -> None:
    prefill, decode = pair
    rooms = {11: (20, 10), 12: (40, 20)}
    for room, (_, dst) in rooms.items():
        start_room(prefill, decode, room, [dst + i for i in range(4)], 64)
    for first in (0, 2):
        for room, (src, _) in rooms.items():
            pages = [src + first, src + first + 1]
            prefill.do("send", room=room, src_pages=pages, first_page_index=first)
    for room, (src, dst) in rooms.items():
        prefill.do("finish", room=room, tokens=64)
        decode.wait("Received", room)
        want = prefill.do("pages", pages=[src + i for i in range(4)])
        assert decode.do("pages", pages=[dst + i for i in range(4)]) == want


def test_idle_workers_sleep(pair: tuple[Process, Process]) -> None:
    transfer(*pair, 31, [0, 1], [2, 3])
    # The wire-up grace after a first contact is over once this much time has passed.
    cpu_shares(pair, 1.5)
    assert max(cpu_shares(pair, 2.5)) < 0.01
    for worker in pair:
        assert worker.do("idle") == [False, None]


def test_mismatch_is_told_on_both_legs_and_both_workers_go_on(workers: Workers) -> None:
    prefill, decode = workers.start("prefill"), workers.start("decode", page_size=32)
    prefill.do("open", room=1)
    decode.do("open", room=1, host="127.0.0.1", port=prefill.bootstrap)
    reason = decode.wait("Failed", 1)["reason"]
    assert "page_size: 32 at decode, 16 at prefill" in reason
    assert prefill.wait("Failed", 1)["reason"] == reason
    transfer(prefill, workers.start("decode"), 2, [0, 1], [2, 3])


def test_workers_with_different_backends_are_told_both_names(workers: Workers) -> None:
    prefill, decode = workers.start("prefill", backend="mooncake"), workers.start("decode", backend="nixl")
    prefill.do("open", room=1)
    decode.do("open", room=1, host="127.0.0.1", port=prefill.bootstrap)
    reason = decode.wait("Failed", 1)["reason"]
    assert "transfer backend: nixl at decode, mooncake at prefill" in reason
    assert prefill.wait("Failed", 1)["reason"] == reason


def test_duplicate_room_is_refused_by_both(pair: tuple[Process, Process]) -> None:
    prefill, decode = pair
    start_room(prefill, decode, 21, [1, 2], 32)
    again = {"host": "127.0.0.1", "port": prefill.bootstrap}
    assert prefill.tell("open", room=21)["kind"] == "DuplicateRoom"
    assert decode.tell("open", room=21, **again)["kind"] == "DuplicateRoom"
    prefill.do("send", room=21, src_pages=[3, 4], first_page_index=0)
    prefill.do("finish", room=21, tokens=32)
    decode.wait("Received", 21)
