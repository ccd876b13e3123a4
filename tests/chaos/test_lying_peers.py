"""Decode workers that lie about pages, addresses, rooms and leases: refused before any write."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cluster import Cluster, Worker
from support.lying_decode import NUM_PAGES, PAGE_BYTES, PAGE_SIZE, PAGES, PROMPT, Liar, Stranger
from support.tiny_model import save_tiny_model

from diptych.common_config.namespaces.disagg import TRANSFER_BACKENDS
from diptych.kvtransfer import wire
from diptych.kvtransfer.backends.interface import Endpoint
from diptych.kvtransfer.backends.mooncake_engine import Session
from diptych.kvtransfer.bootstrap.client import fetch_route
from diptych.kvtransfer.bootstrap.route import Route

FLAGS = (
    *("--dtype", "float32", "--page-size", str(PAGE_SIZE), "--max-total-tokens", "2048"),
    *("--heartbeat-interval", "1", "--bootstrap-timeout", "20", "--disable-radix-cache"),
    "--enable-fault-injection",
)

rooms = itertools.count(1)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=TRANSFER_BACKENDS)
def cluster(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Cluster]:
    backend = ("--disaggregation-transfer-backend", request.param)
    cluster = Cluster(*FLAGS, *backend, model=str(tiny_model))
    try:
        yield cluster
        cluster.close()
    finally:
        cluster.kill()


@pytest.fixture(scope="module")
def route(cluster: Cluster) -> Route:
    """The real prefill worker's."""
    return fetch_route("127.0.0.1", int(cluster.prefill.launched.bootstrap_port))


@pytest.fixture(scope="module")
def right(cluster: Cluster) -> list[int]:
    return tokens(cluster.client.ok("/generate", body()))


@pytest.fixture(autouse=True)
def everybody_else_is_unharmed(cluster: Cluster, right: list[int]) -> Iterator[None]:
    with cluster.prefill.faults, cluster.decode.faults:
        yield
    cluster.wait_until_idle()
    assert tokens(cluster.client.ok("/generate", body())) == right


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def liar_who_met_prefill(route: Route) -> Iterator[Liar]:
    with Liar(route) as liar:
        liar.hello(liar.backend.endpoint())
        liar.receive(wire.Welcome)
        yield liar
        liar.close()


@pytest.fixture
def liar(liar_who_met_prefill: Liar) -> Liar:
    liar_who_met_prefill.slab.zero_()
    return liar_who_met_prefill


def body(**pairing: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling, **pairing}


def tokens(answer: Any) -> list[int]:
    return list(answer["output_ids"])


def start(pool: ThreadPoolExecutor, worker: Worker, room: int, **pairing: Any) -> Future[tuple[int, Any]]:
    """This worker's leg."""
    return pool.submit(worker.client.post, "/generate", body(bootstrap_room=room, **pairing))


def counted(worker: Worker, name: str, **labels: str) -> float:
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for sample, value in worker.client.metrics().items()
        if sample.startswith(f"diptych_transfer_{name}") and all(label in sample for label in wanted)
    )


RESERVATIONS: dict[str, dict[str, Any]] = {
    "a page beyond the slab": {"pages": [5, 6, NUM_PAGES]},
    "a page far beyond the slab": {"pages": [5, 6, 2**63 - 1]},
    "a negative page": {"pages": [5, 6, -1]},
    "the same page twice": {"pages": [5, 6, 6]},
    "more pages than there are": {"pages": [i % NUM_PAGES for i in range(200_000)]},
    "a negative first page": {"first_page_index": -1, "pages": [5, 6, 9, 10]},
    "a negative number of tokens": {"num_prompt_tokens": -len(PROMPT)},
}


@pytest.mark.parametrize("lies", RESERVATIONS.values(), ids=RESERVATIONS.keys())
def test_impossible_reservation_is_refused_before_any_write_and_the_true_one_honoured(
    cluster: Cluster, liar: Liar, pool: ThreadPoolExecutor, lies: dict[str, Any]
) -> None:
    room = next(rooms)
    writes = counted(cluster.prefill, "writes_total")
    refusals = counted(cluster.prefill, "control_dropped_total", reason="refused")
    leg = start(pool, cluster.prefill, room)
    abort = liar.refused(liar.reserve(room, **lies))
    assert abort.status == 400
    assert "reservation refused" in abort.reason
    assert counted(cluster.prefill, "writes_total") == writes
    assert counted(cluster.prefill, "control_dropped_total", reason="refused") == refusals + 1
    liar.reserve(room)
    complete = liar.receive(wire.Complete)
    assert complete.num_pages == len(PAGES)
    assert liar.written() == PAGES
    assert leg.result(10)[0] == 200


MISFITS: dict[str, dict[str, Any]] = {
    "too few pages": {"pages": [5, 6]},
    "too many pages": {"pages": [5, 6, 9, 10]},
    "another prompt": {"num_prompt_tokens": len(PROMPT) + 1},
    "pages it has none of": {"first_page_index": 2**40},
    "a shifted beginning": {"first_page_index": 1},
}


@pytest.mark.parametrize("lies", MISFITS.values(), ids=MISFITS.keys())
def test_reservation_for_another_prompt_fails_the_room_before_any_write(
    cluster: Cluster, liar: Liar, pool: ThreadPoolExecutor, lies: dict[str, Any]
) -> None:
    room = next(rooms)
    leg = start(pool, cluster.prefill, room)
    abort = liar.refused(liar.reserve(room, **lies))
    assert abort.status == 400
    status, answer = leg.result(10)
    assert (status, answer["error"]["message"]) == (400, abort.reason)
    assert liar.written() == []


def test_replayed_reservation_writes_nothing_even_when_its_room_is_used_again(
    cluster: Cluster, liar: Liar, pool: ThreadPoolExecutor
) -> None:
    room = next(rooms)
    leg = start(pool, cluster.prefill, room)
    reserve = liar.reserve(room)
    liar.receive(wire.Complete)
    assert leg.result(10)[0] == 200
    liar.slab.zero_()
    dropped = counted(cluster.prefill, "control_dropped_total", reason="unexpected")
    leg = start(pool, cluster.prefill, room)
    for _ in range(3):
        liar.tell(reserve)
    # Answered in order: once this has its answer, the replays have been judged.
    other = liar.reserve(next(rooms), pages=[-1])
    liar.refused(other)
    assert counted(cluster.prefill, "control_dropped_total", reason="unexpected") == dropped + 3
    assert counted(cluster.prefill, "rooms", state="awaiting destination") == 1
    assert liar.written() == []
    fresh = liar.reserve(room)
    assert liar.receive(wire.Complete).lease == fresh.lease
    assert leg.result(10)[0] == 200


def test_nobody_takes_another_peers_room(
    cluster: Cluster, liar: Liar, pool: ThreadPoolExecutor, right: list[int]
) -> None:
    room = next(rooms)
    port = int(cluster.prefill.launched.bootstrap_port)
    cluster.prefill.faults.hold("complete")
    start(pool, cluster.prefill, room)
    leg = start(pool, cluster.decode, room, bootstrap_host="127.0.0.1", bootstrap_port=port)
    (held,) = cluster.prefill.faults.wait_held(1, where="send")
    assert held["room"] == room
    # Written and not yet announced; now for a room that prefill is still sending to.
    other = next(rooms)
    cluster.prefill.faults.stall()
    start(pool, cluster.prefill, other)
    other_leg = start(pool, cluster.decode, other, bootstrap_host="127.0.0.1", bootstrap_port=port)
    cluster.prefill.faults.wait_held(1, where="write")
    abort = liar.refused(liar.reserve(other))
    assert abort.reason == f"bootstrap_room {other} already has a destination"
    for lease in range(1, 20):
        liar.tell(wire.Abort(room=other, lease=lease, reason="mine", status=400))
        assert liar.receive(wire.RoomDrained).room == other
        liar.tell(wire.Verified(room=other, lease=lease))
    assert liar.written() == []
    cluster.prefill.faults.release()
    for each in (leg, other_leg):
        status, answer = each.result(10)
        assert status == 200, answer
        assert tokens(answer) == right


HELLOS: dict[str, dict[str, Any]] = {
    "no page": {"num_pages": 0},
    "a negative number of pages": {"num_pages": -1},
    "more pages than a slab can have": {"num_pages": 2**40},
    "more pages than numbers": {"num_pages": 2**62},
    "pages of another size": {"page_bytes": PAGE_BYTES + 1},
    "a negative address": {"base_address": -PAGE_BYTES},
    "an address beyond memory": {"base_address": 2**57},
    "another transfer library": {"backend": "fake"},
}


@pytest.mark.parametrize("lies", HELLOS.values(), ids=HELLOS.keys())
def test_impossible_slab_is_refused_at_first_contact(
    cluster: Cluster, liar: Liar, route: Route, lies: dict[str, Any]
) -> None:
    refusals = counted(cluster.prefill, "handshakes_total", outcome="refused")
    with Stranger(route) as stranger:
        stranger.hello(msgspec.structs.replace(liar.backend.endpoint(), **lies))
        assert stranger.receive(wire.Refused).status == 502
        # Nor is anything taken from it afterwards.
        stranger.reserve(next(rooms))
        assert "no handshake with this worker" in stranger.receive(wire.Refused).reason
    assert counted(cluster.prefill, "handshakes_total", outcome="refused") == refusals + 1


@pytest.mark.parametrize(
    "lies",
    [{"control_address": "ipc:///tmp/x"}, {"control_address": "tcp://nowhere"}, {"identity": "another's"}],
    ids=["an address that is no port", "an address that is none", "another identity"],
)
def test_hello_of_somebody_else_is_refused(
    cluster: Cluster, liar: Liar, route: Route, lies: dict[str, Any]
) -> None:
    with Stranger(route) as stranger, Stranger(route) as other:
        if "identity" in lies:
            lies = {"identity": other.identity}
        stranger.hello(liar.backend.endpoint(), **lies)
        assert stranger.receive(wire.Refused).status == 502


def unusable(true: Endpoint) -> dict[str, Endpoint]:
    """Slabs that only the transfer library can find out about."""

    def session(name: str) -> bytes:
        """Mooncake's metadata; to NIXL it is garbage like any other."""
        return msgspec.msgpack.encode(Session(name=name, protocol="tcp"))

    bad: dict[str, dict[str, Any]] = {
        "nothing": {"metadata": b""},
        "garbage": {"metadata": bytes(range(256))},
        "half": {"metadata": true.metadata[: len(true.metadata) // 2]},
        "nobody's": {"metadata": session("127.0.0.1:1")},
        "nowhere": {"metadata": session("256.0.0.1:7")},
        "no port": {"metadata": session("127.0.0.1:99999")},
        "elsewhere": {"base_address": true.base_address + 2**40},
        "larger": {"num_pages": 4 * NUM_PAGES},
        "absurd": {"num_pages": 2**24},
    }
    return {name: msgspec.structs.replace(true, **lies) for name, lies in bad.items()}


NAMES = ("nothing", "garbage", "half", "nobody's", "nowhere", "no port", "elsewhere", "larger", "absurd")


@pytest.mark.parametrize("name", NAMES)
def test_slab_that_the_library_cannot_reach_fails_the_room_and_nothing_else(
    cluster: Cluster, liar: Liar, route: Route, pool: ThreadPoolExecutor, name: str
) -> None:
    with Stranger(route) as stranger:
        stranger.hello(unusable(liar.backend.endpoint())[name])
        answer = stranger.receive((wire.Welcome, wire.Refused))
        if isinstance(answer, wire.Welcome):
            room = next(rooms)
            leg = start(pool, cluster.prefill, room)
            # Its last page: one that is not where it says.
            stranger.reserve(room, pages=[5, 6, stranger.num_pages - 1])
            status, error = leg.result(15)
            assert status == 502, error
            assert "page transfer to the decode worker failed" in error["error"]["message"]
            stranger.receive(wire.Refused)
    assert liar.written() == []
