"""The sockets by which the router reaches workers."""

from __future__ import annotations

import socket
from collections.abc import Callable

AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[object, ...]]


def worker_sockets(dead_peer_timeout: float) -> Callable[[AddressInfo], socket.socket]:
    """Makes sockets that break once the peer's machine hasn't acknowledged anything for about
    `dead_peer_timeout` seconds (RFC 5482 and RFC 1122, 4.2.3.6).

    A stream that only receives would otherwise never notice that the network or the machine is gone: nothing
    is sent, so nothing is missed. An idle connection costs a segment per third of the time.
    """
    probe_interval = max(1, round(dead_peer_timeout / 3))

    def make(info: AddressInfo) -> socket.socket:
        family, kind, protocol, _, _ = info
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_interval)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_interval)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        # For what was sent and isn't acknowledged, such as the request itself.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(dead_peer_timeout * 1000))
        return made

    return make
