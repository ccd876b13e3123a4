"""An outbound control connection to one peer, which notices when the peer stops answering."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

from diptych.kvtransfer.cluster import ClusterKeys, set_key
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.wire import MAX_CONTROL_BYTES

_MAX_CONNECT_ATTEMPTS = 5
_RECONNECT_MS = 100

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def set_common_options(socket: zmq.Socket[bytes], heartbeat_interval: float) -> None:
    """Size limit and heartbeats: a silent peer is given up after at most two intervals, in libzmq's own
    I/O thread, so that an idle scheduler sleeps."""
    milliseconds = max(1, int(heartbeat_interval * 1000))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, milliseconds)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, milliseconds)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2 * milliseconds)
    # While nobody answers, TCP doubles the time between its attempts: after an outage the next could be as
    # far off as the outage was long.
    socket.setsockopt(zmq.CONNECT_TIMEOUT, max(1, milliseconds // 2))


class PeerLink:
    """A DEALER to one process start of one peer. Once down it is closed and never used again: what was
    queued for a process that died must not reach the one that replaces it.

    Raises `TransferError` for an address that can't be one."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        target: str,
        number: int,
        heartbeat_interval: float,
        keys: ClusterKeys | None = None,
    ) -> None:
        self.address = address
        self.target = target
        """Instance id of the addressee."""
        self.number = number
        """Of this worker's links, upwards."""
        self.socket = context.socket(zmq.DEALER)
        set_common_options(self.socket, heartbeat_interval)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        if keys is not None:
            set_key(self.socket, keys.connecting)
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.listening.public)
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(_EVENTS)
        self.was_up = False
        self._attempts = 0
        self._down: str | None = None
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise TransferError(f"control address {address!r}: {error}") from error

    def send(self, frames: list[bytes]) -> None:
        """Queue a message. A queue that is full (the peer reads nothing) takes the link down."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._down = f"the control queue to {self.address} is full"

    def fail(self, reason: str) -> None:
        """The next `check` reports the link as down for this reason."""
        self._down = reason

    def check(self) -> str | None:
        """Read the socket monitor; the reason if the link is down."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.was_up = True
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self._attempts += 1
                if self._attempts >= _MAX_CONNECT_ATTEMPTS and not self.was_up:
                    self._down = f"no connection to the control port {self.address}"
            elif self.was_up:
                self._down = f"connection to the control port {self.address} lost"
            elif self._down is None:
                # Which side sees what is wrong with the handshake is a matter of chance.
                self._down = (
                    f"connection to the control port {self.address} not established; do both workers have "
                    "the same --cluster-secret, or none?"
                )
        return self._down

    def close(self, linger_ms: int = 0) -> None:
        self.socket.disable_monitor()
        # Not left to the garbage collector: the context waits for every socket when it ends.
        self.monitor.close(0)
        self.socket.close(linger_ms)
