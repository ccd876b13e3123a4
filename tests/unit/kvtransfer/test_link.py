"""A control link on TCP that a network treats badly."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
import zmq

from diptych.kvtransfer.link import PeerLink, set_common_options

HEARTBEAT_S = 0.2


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(0)


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """Nothing answers on it, not even with a refusal: the queue of its listener is full, so that the kernel
    drops what comes."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_link_made_while_nobody_answers_is_up_soon_after_somebody_does(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """TCP itself would try again after a second, and then after two, four, eight."""
    with deaf_port() as port:
        began = time.monotonic()
        link = PeerLink(context, f"tcp://127.0.0.1:{port}", "peer", 1, HEARTBEAT_S)
        assert not link.monitor.poll(HEARTBEAT_S / 4 * 1000)
        assert link.check() is None
    peer = context.socket(zmq.ROUTER)
    set_common_options(peer, HEARTBEAT_S)
    peer.bind(f"tcp://127.0.0.1:{port}")
    link.send([b"word"])
    assert peer.poll(5000)
    assert time.monotonic() - began < 0.8
    assert link.check() is None
    link.close()


def test_link_to_a_port_that_never_answers_is_given_up(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with deaf_port() as port:
        began = time.monotonic()
        link = PeerLink(context, f"tcp://127.0.0.1:{port}", "peer", 1, HEARTBEAT_S)
        reason = None
        while reason is None:
            assert link.monitor.poll(5000)
            reason = link.check()
        assert reason == f"no connection to the control port tcp://127.0.0.1:{port}"
        assert time.monotonic() - began > 2 * HEARTBEAT_S
        link.close()
