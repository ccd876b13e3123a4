"""A peer on another host, killed: neither its pid nor its memory tells, and its kernel may still send."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.hosts import Host, packets_lost, two_hosts

from diptych.common_config.namespaces.disagg import TRANSFER_BACKENDS

from .conftest import FAST, Process, Workers, start_room, transfer

SETTINGS = {**FAST, "heartbeat_interval": 0.25}
OUTAGE_S = 1.6
"""Linux tries again after 0.2, 0.6, 1.4 and 3.0 s: the pause after this is longer than several heartbeats."""
SRC, DST = list(range(40)), list(range(8, 48))


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture(params=TRANSFER_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def pair(workers: Workers, hosts: tuple[Host, Host], backend: str) -> tuple[Process, Process]:
    """Prefill on one, decode on the other; they have met."""
    prefill = workers.start("prefill", on=hosts[0], backend=backend, settings=SETTINGS)
    decode = workers.start("decode", on=hosts[1], backend=backend, settings=SETTINGS)
    prefill.do("fill", pages=list(range(64)), seed=1)
    transfer(prefill, decode, 1, [1, 2], [3, 4])
    return prefill, decode


def assert_serve(prefill: Process, decode: Process) -> None:
    prefill.do("fill", pages=SRC, seed=2)
    transfer(prefill, decode, 3, SRC, DST)
    assert decode.do("pages", pages=DST) == prefill.do("pages", pages=SRC)


def test_what_the_kernel_of_a_killed_prefill_still_sends_lands_before_pages_are_given_back(
    pair: tuple[Process, Process], workers: Workers, hosts: tuple[Host, Host], backend: str
) -> None:
    prefill, decode = pair
    start_room(prefill, decode, 2, DST, 640)
    with packets_lost(*hosts):
        prefill.do("send", room=2, src_pages=SRC, first_page_index=0)
        sent = time.monotonic()
        time.sleep(0.2)  # the library fills the socket's buffer
        prefill.kill()
        decode.wait("Failed", 2)
        before = decode.do("pages", pages=DST)
        time.sleep(max(0.0, sent + OUTAGE_S - time.monotonic()))
    decode.wait("Drained", 2, timeout=20)
    assert decode.do("pages", pages=DST) != before
    ports = {"port": prefill.control_port, "bootstrap": prefill.bootstrap}
    assert_serve(workers.start("prefill", on=hosts[0], backend=backend, **ports), decode)


def test_write_to_a_decode_that_was_killed_during_an_outage_ends_after_it(
    pair: tuple[Process, Process], workers: Workers, hosts: tuple[Host, Host], backend: str
) -> None:
    prefill, decode = pair
    start_room(prefill, decode, 2, DST, 640)
    with packets_lost(*hosts):
        prefill.do("send", room=2, src_pages=SRC, first_page_index=0)
        decode.kill()
        assert prefill.wait("Failed", 2)["drained"] is False
    prefill.wait("Drained", 2)
    again = workers.start("decode", on=hosts[1], backend=backend, port=decode.control_port)
    assert_serve(prefill, again)
