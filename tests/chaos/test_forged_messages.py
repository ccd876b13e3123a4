"""Bytes that are no messages, at every port that peers reach; and a prefill worker that lies to decode."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from support.client import Client
from support.cluster import Cluster, Worker
from support.hand_made import PREAMBLE, Dripping, HandMadePeer, garbled
from support.lying_prefill import LyingPrefill
from support.soak.workers import Footprint, free_ports
from support.tiny_model import VOCABULARY, save_tiny_model

from diptych.engine.wire import TokenLogprob
from diptych.kvtransfer import wire
from diptych.kvtransfer.bootstrap.client import fetch_route
from diptych.kvtransfer.bootstrap.route import Route

PROMPT = [1000 + 7 * i for i in range(40)]
NUM_PAGES = 3
HANDSHAKE_S = 3.0
FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "2048", "--disable-radix-cache"),
    *("--heartbeat-interval", "1", "--handshake-timeout", str(HANDSHAKE_S), "--bootstrap-timeout", "3"),
    *("--receive-timeout", "3", "--transfer-timeout", "3", "--enable-fault-injection"),
)

rooms = itertools.count(1)


@pytest.fixture(scope="module")
def control_ports() -> list[int]:
    return free_ports(2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, control_ports: list[int]) -> Iterator[Cluster]:
    prefill, decode = [("--disaggregation-control-port", str(port)) for port in control_ports]
    model = save_tiny_model(tmp_path_factory.mktemp("model"))
    cluster = Cluster(*FLAGS, prefill_flags=prefill, decode_flags=decode, model=str(model))
    try:
        yield cluster
        cluster.close()
    finally:
        cluster.kill()


@pytest.fixture(scope="module")
def bootstrap_port(cluster: Cluster) -> int:
    return int(cluster.prefill.launched.bootstrap_port)


@pytest.fixture(scope="module")
def route(bootstrap_port: int) -> Route:
    """The real prefill worker's."""
    return fetch_route("127.0.0.1", bootstrap_port)


@pytest.fixture(scope="module")
def right(cluster: Cluster) -> list[int]:
    return tokens(cluster.client.ok("/generate", body()))


@pytest.fixture(autouse=True)
def the_next_request_is_right(cluster: Cluster, right: list[int]) -> Iterator[None]:
    with cluster.prefill.faults, cluster.decode.faults:
        yield
    cluster.wait_until_idle()
    assert tokens(cluster.client.ok("/generate", body())) == right


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def body(**pairing: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling, **pairing}


def tokens(answer: Any) -> list[int]:
    ids: list[int] = answer["output_ids"]
    return ids


def dropped(worker: Worker) -> dict[str, float]:
    """Control messages not acted on, by reason."""
    prefix = "diptych_transfer_control_dropped_total"
    return {
        reason: worker.client.metrics()[f'{prefix}{{backend="nixl",reason="{reason}"}}']
        for reason in ("malformed", "version", "unexpected", "foreign")
    }


# ---- bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_garbled_messages_are_counted_and_dropped(
    cluster: Cluster, control_ports: list[int], side: str
) -> None:
    worker, port = dict(
        prefill=(cluster.prefill, control_ports[0]), decode=(cluster.decode, control_ports[1])
    )[side]
    address = f"tcp://127.0.0.1:{port}"
    draw = random.Random(side)
    before = dropped(worker)
    with HandMadePeer() as stranger:
        sent = [frames for _ in range(300) if (frames := garbled(draw, "anybody"))]
        for frames in sent:
            stranger.send_frames(address, frames)
        for version in range(1, 11):
            stranger.send_frames(address, [b"DPTC" + bytes([100 + version]), b"of another time"])
        # The last: its answer says that the others have been read.
        stranger.send(address, "somebody else", wire.Welcome(hello=1))
        refusals = [stranger.receive(wire.Refused).reason for _ in range(11)]
    assert refusals[:10] == [
        f"transfer protocol version {100 + version} at the peer, version {wire.PROTOCOL_VERSION} here"
        for version in range(1, 11)
    ]
    assert "replaced" in refusals[10]
    after = dropped(worker)
    assert after["malformed"] - before["malformed"] == len(sent)
    assert after["version"] - before["version"] == 10


def test_connections_that_speak_no_zmq_do_no_harm(control_ports: list[int]) -> None:
    for port in control_ports:
        for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\xff" + bytes(8) + b"\x7f", b""):
            with socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.sendall(data)


def test_oversized_message_closes_its_connection_alone(cluster: Cluster, control_ports: list[int]) -> None:
    for worker, port in zip(cluster.workers, control_ports, strict=True):
        with HandMadePeer() as stranger:
            before = Footprint.of(worker.launched.scheduler_pid()).megabytes
            stranger.send_frames(f"tcp://127.0.0.1:{port}", [PREAMBLE, bytes(wire.MAX_CONTROL_BYTES + 1)])
            # By a new connection, since the one above is gone; and never more than one limit in memory.
            with HandMadePeer() as other:
                other.send(f"tcp://127.0.0.1:{port}", "somebody else", wire.Welcome(hello=1))
                other.receive(wire.Refused)
            assert Footprint.of(worker.launched.scheduler_pid()).megabytes < before + 100


@pytest.mark.parametrize("how", ["noise", "truncate", "version", "oversize"])
def test_corruption_on_the_way_fails_requests_or_goes_unnoticed(
    cluster: Cluster, right: list[int], how: str
) -> None:
    """Whatever kind of message it is that gets damaged; more of them come than there are requests."""
    for worker in cluster.workers:
        worker.faults.corrupt(how=how, probability=0.3)
    answers = cluster.client.post_all("/generate", [body() for _ in range(8)], stagger=0.05)
    for status, answer in answers:
        assert status in (200, 502, 503, 504), answer
        assert status != 200 or tokens(answer) == right
    assert sum(worker.faults.fired() for worker in cluster.workers)


ROUTES: dict[str, tuple[str, bytes, int]] = {
    "no JSON": ("PUT", b"\x00\xff", 400),
    "nothing": ("PUT", b"", 400),
    "deep": ("PUT", b"[" * 100_000, 400),
    "a list": ("PUT", b"[]", 400),
    "no field": ("PUT", b"{}", 400),
    "huge": ("PUT", b" " * (2 << 20), 413),
    "another method": ("POST", b"{}", 405),
}


@pytest.mark.parametrize(("method", "data", "expected"), ROUTES.values(), ids=ROUTES.keys())
async def test_registration_that_is_none_is_refused(
    cluster: Cluster, bootstrap_port: int, route: Route, method: str, data: bytes, expected: int
) -> None:
    status, answer = await Client(f"http://127.0.0.1:{bootstrap_port}").request(method, "/route", data)
    assert status == expected
    assert answer["error"]
    assert await asyncio.to_thread(fetch_route, "127.0.0.1", bootstrap_port) == route


# ---- a prefill worker that lies ----------------------------------------------------------------------------

COMPLETES: dict[str, tuple[dict[str, Any], str]] = {
    "the aux block of another room": ({"aux_room": 10**6}, "the aux block is stamped with room 1000000, not"),
    "too few pages": ({"num_pages": NUM_PAGES - 1}, "prefill wrote 2 of 3 pages"),
    "a negative number of pages": ({"num_pages": -1}, "prefill wrote -1 of 3 pages"),
    "more pages than reserved": ({"num_pages": 10**12}, "prefill wrote 1000000000000 of 3 pages"),
    "another prompt": ({"prompt_tokens": len(PROMPT) + 1}, "prompt tokens: 41 at prefill, 40 at decode"),
    "a token beyond the vocabulary": ({"first_token": VOCABULARY}, "first token"),
    "a negative token": ({"first_token": -1}, "first token"),
    "no token": ({"first_token": None}, "no first token"),
    "more cached tokens than there are": ({"cached_tokens": 41}, "cached tokens"),
    "fewer cached tokens than none": ({"cached_tokens": -1}, "cached tokens"),
    "too few prompt logprobs": ({"prompt_logprobs": [None]}, "prompt log-probabilities"),
    "too many prompt logprobs": ({"prompt_logprobs": [None] * 50}, "prompt log-probabilities"),
    "the logprob of no token": ({"first_logprob": TokenLogprob(2**62, 0.0)}, "log-probabilit"),
}


@pytest.mark.parametrize(("lies", "reason"), COMPLETES.values(), ids=COMPLETES.keys())
def test_completion_that_cannot_be_fails_the_request(
    cluster: Cluster, route: Route, pool: ThreadPoolExecutor, lies: dict[str, Any], reason: str
) -> None:
    with LyingPrefill(route) as prefill:
        leg = prefill.meet(pool, cluster.decode.client, body(), next(rooms))
        reserve = prefill.welcome()
        prefill.tell(prefill.complete(reserve, **lies))
        status, answer = leg.result(10)
        assert status == 502, answer
        assert reason in answer["error"]["message"]


def test_strangers_word_for_a_room_is_not_taken(
    cluster: Cluster, route: Route, pool: ThreadPoolExecutor
) -> None:
    with LyingPrefill(route) as prefill, HandMadePeer() as stranger:
        leg = prefill.meet(pool, cluster.decode.client, body(), next(rooms))
        reserve = prefill.welcome()
        before = dropped(cluster.decode)["foreign"]
        room, lease = reserve.room, reserve.lease
        for forged in (
            prefill.complete(reserve, first_token=8),
            wire.Abort(room=room, lease=lease, reason="so there", status=400),
            wire.RoomDrained(room=room, lease=lease, clean=True),
        ):
            prefill.tell(forged, source=stranger.instance_id)
        prefill.tell(prefill.complete(reserve, lease=lease + 1))
        assert not leg.done()
        prefill.tell(prefill.complete(reserve))
        status, answer = leg.result(10)
        assert status == 200, answer
        assert tokens(answer)[0] == 7
        assert dropped(cluster.decode)["foreign"] == before + 3
        # Once more, for a room that has ended.
        prefill.tell(prefill.complete(reserve, first_token=9))


REFUSALS: dict[str, dict[str, Any]] = {
    "no error": {"status": 200},
    "a huge status": {"status": 10**9},
    "a long reason": {"reason": "x" * (1 << 20)},
    "a reason of two lines": {"reason": "no\r\nX-Header: yes\x00"},
}


@pytest.mark.parametrize("lies", REFUSALS.values(), ids=REFUSALS.keys())
def test_refusal_that_cannot_be_is_an_error_all_the_same(
    cluster: Cluster, route: Route, pool: ThreadPoolExecutor, lies: dict[str, Any]
) -> None:
    with LyingPrefill(route) as prefill:
        leg = prefill.meet(pool, cluster.decode.client, body(), next(rooms))
        truth = wire.Refused(reason="no", instance_id=prefill.instance_id, hello=prefill.hello)
        prefill.tell(msgspec.structs.replace(truth, **lies))
        status, answer = leg.result(10)
        assert 500 <= status < 600
        assert answer["error"]["message"]


def test_services_that_never_end_their_answer_hold_up_nobody_else(
    cluster: Cluster, pool: ThreadPoolExecutor, right: list[int]
) -> None:
    with ExitStack() as stack:
        services = [stack.enter_context(Dripping()) for _ in range(6)]
        legs = [
            pool.submit(
                cluster.decode.client.post, "/generate",
                body(bootstrap_room=next(rooms), bootstrap_host="127.0.0.1", bootstrap_port=service.port),
            )
            for service in services
        ]  # fmt: skip
        for leg in legs:
            status, answer = leg.result(HANDSHAKE_S + 5)
            assert status in (502, 504), answer
        # A worker that decode doesn't know yet, so that it must be looked up.
        with LyingPrefill(fetch_route("127.0.0.1", int(cluster.prefill.launched.bootstrap_port))) as prefill:
            leg = prefill.meet(pool, cluster.decode.client, body(), next(rooms))
            reserve = prefill.welcome()
            prefill.tell(prefill.complete(reserve))
            assert leg.result(10)[0] == 200
