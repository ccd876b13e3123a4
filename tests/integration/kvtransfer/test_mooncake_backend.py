"""Mooncake's own traps: thousands of pieces, a session that two workers have had, a peer that lies."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from diptych.kvtransfer.backends.interface import PageWrite, WriteState
from diptych.kvtransfer.backends.mooncake import MooncakeBackend
from diptych.kvtransfer.backends.mooncake_engine import Session
from diptych.kvtransfer.backends.mooncake_library import MooncakeSettings
from diptych.kvtransfer.errors import TransferError

PAGE_BYTES = 4096
NUM_PAGES = 5000


class Side:
    def __init__(self, agent: str) -> None:
        self.slab = torch.zeros((NUM_PAGES, PAGE_BYTES), dtype=torch.uint8)
        self.backend = MooncakeBackend(
            self.slab, page_bytes=PAGE_BYTES, agent=agent, settings=MooncakeSettings(host="127.0.0.1")
        )

    def wait(self, write: PageWrite) -> WriteState:
        """Sleeps on the backend's descriptor, as the scheduler does."""
        deadline = time.monotonic() + 20
        while self.backend.poll(write) is WriteState.IN_FLIGHT:
            assert time.monotonic() < deadline
            select.select([self.backend.fileno()], [], [], 20)
            self.backend.clear_wakeup()
        return write.state


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Side, Side]]:
    sides = (Side("prefill"), Side("decode"))
    sides[0].slab.random_(0, 256)
    yield sides
    for side in sides:
        side.backend.close()
        side.backend.close()


def test_thousands_of_scattered_pages_arrive_in_one_write(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.backend.connect("d", there.backend.endpoint())
    pages = list(range(NUM_PAGES))
    write = here.backend.post_write("d", pages, pages[::-1])
    assert write.num_descriptors == NUM_PAGES
    assert here.wait(write) is WriteState.DONE
    assert torch.equal(there.slab, here.slab.flip(0))


def test_a_session_that_another_worker_has_had_serves_the_new_one(sides: tuple[Side, Side]) -> None:
    here, there = sides
    for start in range(3):
        endpoint = msgspec.structs.replace(there.backend.endpoint(), agent=f"start {start}")
        here.backend.connect(f"start {start}", endpoint)
        write = here.backend.post_write(f"start {start}", [start, 7], [40, 41])
        assert here.wait(write) is WriteState.DONE
        assert torch.equal(there.slab[40:42], here.slab[[start, 7]])


def test_writes_beyond_the_peers_memory_fail_and_harm_nobody_else(sides: tuple[Side, Side]) -> None:
    here, there = sides
    endpoint = there.backend.endpoint()
    here.backend.connect("good", endpoint)
    liar = msgspec.structs.replace(endpoint, num_pages=2 * NUM_PAGES)
    here.backend.connect("liar", liar)
    src, dst = list(range(0, 200, 2)), list(range(NUM_PAGES + 10, NUM_PAGES + 110))
    writes = [here.backend.post_write("liar", src, dst) for _ in range(3)]
    good = here.backend.post_write("good", [1, 2, 3], [11, 12, 13])
    for write in writes:
        assert here.wait(write) is WriteState.FAILED
        assert write.error
    assert here.wait(good) is WriteState.DONE
    assert here.wait(here.backend.post_write("liar", [1], [1])) is WriteState.FAILED
    # Once it is disconnected, another handshake starts afresh.
    here.backend.disconnect("liar")
    with pytest.raises(TransferError, match="unknown peer"):
        here.backend.post_write("liar", [1], [1])
    here.backend.connect("liar", endpoint)
    assert here.wait(here.backend.post_write("liar", [1], [1])) is WriteState.DONE


def test_memory_that_is_not_the_peers_is_found_out_when_connecting(sides: tuple[Side, Side]) -> None:
    here, there = sides
    endpoint = there.backend.endpoint()
    elsewhere = msgspec.structs.replace(endpoint, base_address=endpoint.base_address + (1 << 40))
    here.backend.connect("elsewhere", elsewhere)
    write = here.backend.post_write("elsewhere", [1], [1])
    assert here.wait(write) is WriteState.FAILED
    assert "no transfer to the peer's Mooncake engine" in write.error


def test_a_peer_that_nobody_answers_for_fails_its_writes(sides: tuple[Side, Side]) -> None:
    here, _ = sides
    gone = Side("gone")
    endpoint = gone.backend.endpoint()
    gone.backend.close()
    here.backend.connect("gone", endpoint)
    write = here.backend.post_write("gone", [1], [1])
    assert here.wait(write) is WriteState.FAILED
    assert "no connection" in write.error


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": "nixl"}, "transfer backend: mooncake here, nixl at the peer"),
        ({"page_bytes": 8192}, "page bytes: 4096 here, 8192 at the peer"),
        ({"num_pages": 1 << 60}, "pages is not one of"),
        ({"base_address": 1 << 57}, "impossible address"),
        ({"metadata": b"\xff\x00"}, "session is unreadable"),
        ({"metadata": msgspec.msgpack.encode(Session(name="host:99999", protocol="tcp"))}, "not host:port"),
        (
            {"metadata": msgspec.msgpack.encode(Session(name="host:1", protocol="rdma"))},
            "mooncake protocol: tcp here, rdma at the peer",
        ),
    ],
)
def test_an_endpoint_that_does_not_fit_is_refused(
    sides: tuple[Side, Side], changes: dict[str, Any], reason: str
) -> None:
    here, there = sides
    with pytest.raises(TransferError, match=reason):
        here.backend.connect("x", msgspec.structs.replace(there.backend.endpoint(), **changes))


def test_closing_in_the_middle_of_a_write_ends_it_and_every_thread() -> None:
    before = set(threading.enumerate())
    here, there = Side("a"), Side("b")
    here.backend.connect("d", there.backend.endpoint())
    pages = list(range(NUM_PAGES))
    write = here.backend.post_write("d", pages, pages[::-1])
    here.backend.close()
    there.backend.close()
    assert write.state in (WriteState.FAILED, WriteState.DONE)
    assert set(threading.enumerate()) <= before
