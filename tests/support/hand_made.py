"""Peers made by hand: they speak the protocol of `kvtransfer/wire.py` over sockets and say what they like."""

from __future__ import annotations

import random
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import zmq

from diptych.kvtransfer import wire
from diptych.kvtransfer.bootstrap.route import RankAddress, Route
from diptych.kvtransfer.identity import Identity

Body = TypeVar("Body", bound=wire.ControlMessage)


PREAMBLE, _ = wire.encode("a", "b", wire.Welcome(hello=1))


def garbled(draw: random.Random, target: str) -> list[bytes]:
    """Frames that are not a message."""
    reserve = wire.Reserve(room=1, lease=1, pages=list(range(50)), num_prompt_tokens=800)
    preamble, payload = wire.encode("stranger", target, reserve)
    return draw.choice(
        [
            [],
            [b""],
            [preamble],
            [preamble, payload, b"more"],
            [draw.randbytes(5), payload],
            [preamble, draw.randbytes(draw.randrange(300))],
            [preamble, payload[: draw.randrange(len(payload))]],
            [preamble, payload + payload],
            [preamble, payload.replace(b"reserve", b"reverse")],
            [preamble, payload.replace(b"\xa4room", b"\xa4r\xffom")],
            [preamble, b"\x91" * 100_000],
            [preamble, b"\xdf\xff\xff\xff\xff"],
        ]
    )


class HandMadePeer:
    """One process start of a peer, as far as anyone can tell."""

    def __init__(self) -> None:
        self.identity = Identity.current()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._links: dict[str, zmq.Socket[bytes]] = {}
        self._envelopes: list[wire.Envelope] = []

    @property
    def instance_id(self) -> str:
        return self.identity.instance_id

    def _link(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._links:
            self._links[address] = self._context.socket(zmq.DEALER)
            self._links[address].connect(address)
        return self._links[address]

    def send(self, address: str, target: str, body: wire.ControlMessage, *, source: str = "") -> None:
        self.send_frames(address, wire.encode(source or self.instance_id, target, body))

    def send_frames(self, address: str, frames: list[bytes]) -> None:
        """Whatever they are."""
        self._link(address).send_multipart(frames)

    def receive(self, kind: type[Body] | tuple[type[Body], ...], seconds: float = 10.0) -> Body:
        """The next message of this kind, by whichever connection; other kinds wait for their own call."""
        deadline = time.monotonic() + seconds
        while True:
            for envelope in self._envelopes:
                if isinstance(envelope.body, kind):
                    self._envelopes.remove(envelope)
                    return envelope.body
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind} within {seconds:g} s, but {self._envelopes}"
            self._poll(left)

    def _poll(self, seconds: float) -> None:
        poller = zmq.Poller()
        for each in (self._router, *self._links.values()):
            poller.register(each, zmq.POLLIN)
        for ready, _ in poller.poll(seconds * 1000):
            frames = ready.recv_multipart()
            self._envelopes.append(wire.decode(frames[1:] if ready is self._router else frames))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(0)


class HandMadeService:
    """A bootstrap service that answers `GET` with the bytes it is given."""

    def __init__(self, answer: bytes, *, status: int = 200) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                """Not on the test's output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def route_to(peer: HandMadePeer, like: Route, *, control_address: str | None = None) -> bytes:
    """What a bootstrap service says of `peer` when it has registered as a worker with the fingerprint, and
    over the transfer backend, of `like`."""
    address = peer.address if control_address is None else control_address
    rank = RankAddress(rank=0, identity=peer.identity, control_address=address)
    route = Route(
        version=wire.PROTOCOL_VERSION,
        worker_id=peer.instance_id,
        fingerprint=like.fingerprint,
        backend=like.backend,
        ranks=[rank],
    )
    return msgspec.json.encode(route)


class Dripping:
    """Takes connections and answers a byte now and then, for ever."""

    def __init__(self, interval: float = 0.2) -> None:
        self._interval = interval
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._closing = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._drip, args=(connection,), daemon=True).start()

    def _drip(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
                while not self._closing.wait(self._interval):
                    connection.sendall(b"a")
            except OSError:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._listener.close()
