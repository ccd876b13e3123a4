"""With a cluster secret nothing is taken from who doesn't have it: neither over the control port nor by the
bootstrap service. Who doesn't have it is told so at once."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from unit.kvtransfer.conftest import Pair, Service, Side, aux, of

from diptych.kvtransfer import wire
from diptych.kvtransfer.bootstrap.client import LookupFailed, fetch_route, register
from diptych.kvtransfer.bootstrap.signing import MAC_HEADER, NONCE_HEADER, request_mac
from diptych.kvtransfer.cluster import ClusterKeys, CurveKeys, Refusals, set_key
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.events import DestinationReady, Failed, HandshakeDone, Received, Sent
from diptych.kvtransfer.sender import PrefillSender

KEYS = ClusterKeys.from_secret("the secret of this cluster")
OTHERS = ClusterKeys.from_secret("the secret of another cluster")


@pytest.fixture
def guarded(pair: Pair) -> Iterator[Pair]:
    """A pair whose sides and bootstrap service have the secret."""
    pair.service.stop()
    pair.service = Service(keys=KEYS)
    pair.keys = KEYS
    return pair


def lookup(pair: Pair, decode: Side, room: int) -> str:
    """The reason for which a room fails whose decode worker looks the prefill worker up."""
    decode.manager.open(room, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(decode, Failed, room)), timeout=2)
    (failed,) = of(decode, Failed, room)
    assert isinstance(failed, Failed)
    return failed.reason


def test_the_same_secret_gives_the_same_keys_and_another_gives_none_of_them() -> None:
    again = ClusterKeys.from_secret("the secret of this cluster")
    assert again == KEYS
    every = {KEYS.listening.public, KEYS.connecting.public, KEYS.listening.secret, KEYS.connecting.secret}
    assert len(every) == 4
    assert not every & {OTHERS.listening.public, OTHERS.connecting.public, OTHERS.listening.secret}
    assert KEYS.signing != OTHERS.signing


def test_a_room_passes_between_workers_with_the_secret(guarded: Pair) -> None:
    prefill, decode = guarded.prefill(), guarded.decode()
    prefill.manager.open(1)
    decode.manager.open(1, "127.0.0.1", guarded.service.port)
    guarded.run_until(lambda: bool(of(decode, HandshakeDone, 1)))
    decode.manager.reserve(1, [0, 1, 2], 12)
    guarded.run_until(lambda: bool(of(prefill, DestinationReady, 1)))
    prefill.manager.send(1, [3, 4, 5], 0)
    prefill.manager.finish(1, aux(1))
    guarded.run_until(lambda: bool(of(decode, Received, 1)) and bool(of(prefill, Sent, 1)))
    assert (prefill.metric("connections_refused_total"), decode.metric("connections_refused_total")) == (0, 0)


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        (OTHERS, KEYS, "another --cluster-secret"),
        (None, KEYS, "asks for a --cluster-secret, and this worker has none"),
        (KEYS, None, "this worker has a --cluster-secret, and the service has none"),
    ],
    ids=["another", "none at decode", "none at prefill"],
)
def test_a_decode_worker_without_prefills_secret_says_so_at_once(
    pair: Pair, here: ClusterKeys | None, there: ClusterKeys | None, said: str
) -> None:
    pair.service.stop()
    pair.service, pair.keys = Service(keys=there), there
    pair.prefill()
    pair.keys = here
    assert said in lookup(pair, pair.decode(), 1)


@pytest.mark.parametrize("here", [OTHERS, None], ids=["another", "none"])
def test_a_control_port_that_asks_for_another_secret_fails_the_room_at_once(
    guarded: Pair, here: ClusterKeys | None
) -> None:
    """The route comes from a service that decode trusts, the worker it names does not."""
    prefill = guarded.prefill(registered=False)
    assert isinstance(prefill.manager, PrefillSender)
    guarded.service.stop()
    guarded.service = Service(keys=here)
    route = prefill.manager.route(worker_id="w")
    register("127.0.0.1", guarded.service.port, route, timeout=2, keys=here)
    guarded.keys = here
    assert "do both workers have the same --cluster-secret" in lookup(guarded, guarded.decode(), 1)


# ---- the control port -------------------------------------------------------------------------------------


class Stranger:
    """A socket of somebody else, with the keys it has."""

    def __init__(self, side: Side, dress: Callable[[zmq.Socket[bytes]], None] = lambda _: None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        dress(self.socket)
        self.socket.connect(side.manager.control_address)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def with_keys(own: CurveKeys, server: bytes) -> Callable[[zmq.Socket[bytes]], None]:
    def dress(socket: zmq.Socket[bytes]) -> None:
        set_key(socket, own)
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)

    return dress


OWN_KEY = CurveKeys(*zmq.curve_keypair())

STRANGERS = {
    "without keys": lambda _: None,
    "with another secret": with_keys(OTHERS.connecting, OTHERS.listening.public),
    "with a key of its own, knowing whom it speaks to": with_keys(OWN_KEY, KEYS.listening.public),
}


@pytest.mark.parametrize("stranger", STRANGERS, ids=list(STRANGERS))
def test_who_forges_a_workers_name_is_not_heard(
    guarded: Pair, stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = guarded.prefill(), guarded.decode()
    prefill.manager.open(1)
    decode.manager.open(1, "127.0.0.1", guarded.service.port)
    guarded.run_until(lambda: bool(of(decode, HandshakeDone, 1)))
    decode.manager.reserve(1, [0, 1, 2], 12)
    guarded.run_until(lambda: bool(of(prefill, DestinationReady, 1)))
    forged = wire.Abort(room=1, lease=1, reason="forged", status=500)
    source, target = decode.identity.instance_id, prefill.identity.instance_id
    for attempt in range(3):
        enemy = Stranger(prefill, STRANGERS[stranger])
        enemy.socket.send_multipart(wire.encode(source, target, forged))
        deadline = time.monotonic() + 5
        while prefill.metric("connections_refused_total") <= attempt:
            assert time.monotonic() < deadline
            guarded.run_for(0.01)  # another thread counts, which wakes no scheduler
        enemy.close()
    prefill.manager.send(1, [3, 4, 5], 0)
    prefill.manager.finish(1, aux(1))
    guarded.run_until(lambda: bool(of(decode, Received, 1)))
    assert not of(prefill, Failed, 1)
    said = [r.getMessage() for r in caplog.records if "control port was refused" in r.getMessage()]
    assert len(said) <= 1, "said once, not for each"


def test_garbage_on_a_guarded_port_harms_nobody(guarded: Pair) -> None:
    prefill, decode = guarded.prefill(), guarded.decode()
    host, _, port = prefill.manager.control_address.removeprefix("tcp://").rpartition(":")
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(63), b"\xff" * 4096):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(data)
    prefill.manager.open(1)
    decode.manager.open(1, "127.0.0.1", guarded.service.port)
    guarded.run_until(lambda: bool(of(decode, HandshakeDone, 1)))


def test_a_port_that_is_taken_leaves_nothing_behind(guarded: Pair) -> None:
    prefill = guarded.prefill(registered=False)
    port = int(prefill.manager.control_address.rpartition(":")[2])
    with pytest.raises(zmq.ZMQError):
        guarded.prefill(registered=False, port=port)


# ---- the bootstrap service --------------------------------------------------------------------------------


def request(
    service: Service, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=3)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    read = answer.status, answer.read()
    connection.close()
    return read


def signed(service: Service, keys: ClusterKeys, method: str, body: bytes, nonce: str) -> dict[str, str]:
    challenge = msgspec.json.decode(request(service, "GET", "/challenge")[1])["challenge"]
    mac = request_mac(keys.signing, challenge, nonce, method, "/route", body)
    return {NONCE_HEADER: nonce, MAC_HEADER: mac}


def test_the_service_takes_and_gives_nothing_unsigned(guarded: Pair) -> None:
    prefill = guarded.prefill()
    assert isinstance(prefill.manager, PrefillSender)
    route, service = fetch_route("127.0.0.1", guarded.service.port, KEYS), guarded.service
    forged = msgspec.json.encode(prefill.manager.route(worker_id="an enemy"))
    nonce = "0" * 32
    good = signed(service, KEYS, "PUT", forged, nonce)
    attempts = {
        "unsigned": ("PUT", forged, {}),
        "unsigned look-up": ("GET", b"", {}),
        "with another secret": ("PUT", forged, signed(service, OTHERS, "PUT", forged, nonce)),
        "signed for a look-up": ("PUT", forged, signed(service, KEYS, "GET", forged, nonce)),
        "signed for another body": ("PUT", forged + b" ", good),
        "signed with another nonce": ("PUT", forged, {**good, NONCE_HEADER: "1" * 32}),
        "no characters of ours": ("PUT", forged, {**good, MAC_HEADER: "\xff\xfe"}),
    }
    for name, (method, body, headers) in attempts.items():
        status, data = request(service, method, "/route", body, headers)
        assert status == 401, name
        assert "cluster secret" in msgspec.json.decode(data)["error"]
    assert fetch_route("127.0.0.1", service.port, KEYS) == route
    assert request(service, "GET", "/health")[0] == 200


def test_a_registration_can_not_be_played_again(guarded: Pair) -> None:
    """Neither at the same service nor at one that was started later."""
    prefill = guarded.prefill(registered=False)
    assert isinstance(prefill.manager, PrefillSender)
    body = msgspec.json.encode(prefill.manager.route(worker_id="old"))
    headers = signed(guarded.service, KEYS, "PUT", body, "a" * 32)
    assert request(guarded.service, "PUT", "/route", body, headers)[0] == 200
    assert request(guarded.service, "PUT", "/route", body, headers)[0] == 401
    guarded.service.stop()
    guarded.service = Service(keys=KEYS)
    assert request(guarded.service, "PUT", "/route", body, headers)[0] == 401


def test_an_answer_that_is_not_the_clusters_proves_nothing(guarded: Pair) -> None:
    """Who sits on the address of a bootstrap service can't name another worker, nor declare one replaced."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        answers = (
            b'{"challenge": "c"}',
            msgspec.json.encode({"version": wire.PROTOCOL_VERSION, "worker_id": "w"}),
        )

        def serve() -> None:
            for body in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{MAC_HEADER}: 00\r\n\r\n"
                    connection.sendall(head.encode() + body)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(LookupFailed, match=r"its answer \(200\) does not prove the --cluster-secret"):
            fetch_route("127.0.0.1", port, KEYS)
        thread.join(5)


def test_a_registration_with_another_secret_is_not_tried_for_long(guarded: Pair) -> None:
    prefill = guarded.prefill(registered=False)
    assert isinstance(prefill.manager, PrefillSender)
    route = prefill.manager.route(worker_id="w")
    with pytest.raises(TransferError, match="another --cluster-secret than this worker"):
        register("127.0.0.1", guarded.service.port, route, timeout=60, keys=OTHERS)


def test_refusals_are_counted_each_and_logged_seldom(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[int] = []
    now = [0.0]
    refusals = Refusals("it was", logging.getLogger("x"), lambda: counted.append(1), clock=lambda: now[0])
    for _ in range(100):
        refusals.add("why")
    now[0] = 11.0
    refusals.add("why not")
    assert len(counted) == 101
    assert [r.getMessage() for r in caplog.records] == [
        "it was refused: why",
        "it was refused (and 99 before it): why not",
    ]
