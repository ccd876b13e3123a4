"""Talking to a bootstrap service: a rank registers, a peer looks up."""

from __future__ import annotations

import http.client
import io
import queue
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from diptych.engine.background import BackgroundPool
from diptych.kvtransfer.bootstrap.route import RankRoute, Route
from diptych.kvtransfer.bootstrap.signing import (
    CHALLENGE,
    MAC_HEADER,
    NONCE_CHARS,
    NONCE_HEADER,
    answer_mac,
    request_mac,
    same,
)
from diptych.kvtransfer.cluster import ClusterKeys
from diptych.kvtransfer.errors import SecretMismatch, TransferError
from diptych.kvtransfer.wire import PROTOCOL_VERSION

_HTTP_TIMEOUT_S = 3.0
"""For one exchange in all: a service that answers a byte now and then would hold its thread for good."""
_RETRY_S = 0.1
_MAX_ANSWER_BYTES = 4 << 20
_ROUTE = "/route"


class LookupFailed(TransferError):
    """No route now. `retry`: the service is there and says that it will have one."""

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


class _Version(msgspec.Struct):
    version: int


class _Challenge(msgspec.Struct):
    challenge: str


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    mac: str


def _route_request(
    host: str, port: int, method: str, keys: ClusterKeys | None, body: bytes = b""
) -> tuple[int, bytes]:
    """One exchange about `/route`, signed both ways when there are `keys`. Raises `OSError`,
    `http.client.HTTPException` or `ValueError`, and `SecretMismatch`."""
    deadline = time.monotonic() + _HTTP_TIMEOUT_S
    if keys is None:
        answer = _request(host, port, method, _ROUTE, body, "", deadline)
        if answer.status == 401:
            raise SecretMismatch("it asks for a --cluster-secret, and this worker has none")
        return answer.status, answer.body
    asked = _request(host, port, "GET", CHALLENGE, b"", "", deadline)
    if asked.status == 404:
        raise SecretMismatch("this worker has a --cluster-secret, and the service has none")
    try:
        challenge = msgspec.json.decode(asked.body, type=_Challenge).challenge
    except msgspec.DecodeError:
        raise ValueError(f"no challenge, but an answer with status {asked.status}") from None
    nonce = secrets.token_hex(NONCE_CHARS // 2)
    mac = request_mac(keys.signing, challenge, nonce, method, _ROUTE, body)
    headers = f"{NONCE_HEADER}: {nonce}\r\n{MAC_HEADER}: {mac}\r\n"
    answer = _request(host, port, method, _ROUTE, body, headers, deadline)
    if answer.status == 401:
        raise SecretMismatch("it has another --cluster-secret than this worker")
    if not same(answer.mac, answer_mac(keys.signing, nonce, answer.status, answer.body)):
        raise SecretMismatch(f"its answer ({answer.status}) does not prove the --cluster-secret")
    return answer.status, answer.body


def _request(
    host: str, port: int, method: str, path: str, body: bytes, headers: str, deadline: float
) -> _Answer:
    """One HTTP exchange. Raises `OSError`, `http.client.HTTPException` or `ValueError`."""
    netloc = f"[{host}]" if ":" in host else host
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {netloc}:{port}\r\nConnection: close\r\n{headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, port), _HTTP_TIMEOUT_S) as connection:
        connection.sendall(head.encode() + body)
        received = bytearray()
        while data := _receive(connection, deadline):
            received += data
            if len(received) > _MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of over {_MAX_ANSWER_BYTES} bytes")
    answer = http.client.HTTPResponse(_Received(bytes(received)), method=method)  # type: ignore[arg-type]
    answer.begin()
    return _Answer(answer.status, answer.read(), answer.headers.get(MAC_HEADER, ""))


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """Raises `TimeoutError` at the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left)
    return connection.recv(1 << 16)


class _Received:
    """A whole answer, where `HTTPResponse` expects the socket to read it from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _message(data: bytes) -> str:
    """The `error` text of a refusal, or the raw beginning of it."""
    try:
        return msgspec.json.decode(data, type=dict[str, str])["error"]
    except (msgspec.DecodeError, KeyError):
        return data[:200].decode("utf-8", "replace")


def register(
    host: str, port: int, route: RankRoute, *, timeout: float, keys: ClusterKeys | None = None
) -> None:
    """Blocking `PUT /route`, retried for `timeout` seconds while the service isn't up yet.
    Raises `TransferError` with the reason; a refusal is not retried."""
    deadline = time.monotonic() + timeout
    body = msgspec.json.encode(route)
    while True:
        try:
            status, data = _route_request(host, port, "PUT", keys, body)
        except SecretMismatch as error:
            raise TransferError(f"the bootstrap service {host}:{port}: {error}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() + _RETRY_S > deadline:
                raise TransferError(
                    f"could not register at the bootstrap service {host}:{port} in {timeout:g} s: {error}"
                ) from error
            time.sleep(_RETRY_S)
            continue
        if status == 200:
            return
        raise TransferError(f"the bootstrap service {host}:{port} refused the registration: {_message(data)}")


def fetch_route(host: str, port: int, keys: ClusterKeys | None = None) -> Route:
    """Blocking `GET /route`, once. Raises `LookupFailed`."""
    where = f"the prefill bootstrap service {host}:{port}"
    try:
        status, data = _route_request(host, port, "GET", keys)
    except SecretMismatch as error:
        raise LookupFailed(f"{where}: {error}", retry=False) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LookupFailed(f"{where} can't be reached: {error}", retry=False) from error
    if status == 503:
        raise LookupFailed(f"{where} is not ready: {_message(data)}", retry=True)
    if status != 200:
        raise LookupFailed(f"{where} answered {status}: {_message(data)}", retry=False)
    try:
        # The version leads, so that another one is named as such rather than as a field that is missing.
        version = msgspec.json.decode(data, type=_Version).version
        if version != PROTOCOL_VERSION:
            raise LookupFailed(
                f"transfer protocol version {version} at the peer, version {PROTOCOL_VERSION} here",
                retry=False,
            )
        return msgspec.json.decode(data, type=Route)
    except msgspec.DecodeError as error:
        raise LookupFailed(f"{where} gave an unreadable route: {error}", retry=False) from error


class RouteLookup:
    """Routes by `(host, port)`: cached, one request at a time for each, fetched in a thread pool."""

    def __init__(self, pool: BackgroundPool, fetch: Callable[[str, int], Route] = fetch_route) -> None:
        self._pool = pool
        self.fetch_route = fetch
        self._cache: dict[tuple[str, int], Route] = {}
        self._running: set[tuple[str, int]] = set()
        self._answers: queue.SimpleQueue[tuple[tuple[str, int], Route | LookupFailed]] = queue.SimpleQueue()

    def get(self, host: str, port: int) -> Route | None:
        """The cached route; None when it is being fetched (started now if need be)."""
        key = (host, port)
        route = self._cache.get(key)
        if route is None and key not in self._running:
            self._running.add(key)
            self._pool.submit(self._fetch, key)
        return route

    def is_running(self, host: str, port: int) -> bool:
        """It has been asked, and its answer has not been taken yet."""
        return (host, port) in self._running

    def invalidate(self, host: str, port: int) -> None:
        self._cache.pop((host, port), None)

    def _fetch(self, key: tuple[str, int]) -> None:
        answer: Route | LookupFailed = LookupFailed("the look-up was interrupted", retry=False)
        try:
            answer = self.fetch_route(*key)
        except LookupFailed as error:
            answer = error
        finally:
            self._answers.put((key, answer))

    def take(self) -> list[tuple[tuple[str, int], Route | LookupFailed]]:
        """What has been answered since the last call."""
        answers = []
        while not self._answers.empty():
            key, answer = self._answers.get_nowait()
            self._running.discard(key)
            if isinstance(answer, Route):
                self._cache[key] = answer
            answers.append((key, answer))
        return answers
