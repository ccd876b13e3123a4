"""The last word on a room is sent once. When it is lost with its connection, that is noticed."""

from __future__ import annotations

import time

import pytest

from diptych.kvtransfer import wire
from diptych.kvtransfer.control import ControlEndpoint
from diptych.kvtransfer.events import DestinationReady, Drained, Failed, HandshakeDone, Sent

from .conftest import Pair, aux, of


def test_complete_lost_with_its_connection_fails_the_room_within_two_heartbeats(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.manager.open(1)
    decode.manager.open(1, "127.0.0.1", pair.service.port)
    pair.run_until(lambda: bool(of(decode, HandshakeDone, 1)))
    decode.manager.reserve(1, [10, 11, 12], 12)
    pair.run_until(lambda: bool(of(prefill, DestinationReady, 1)))
    send = ControlEndpoint.send

    def lost(self: ControlEndpoint, target: str, body: wire.ControlMessage) -> None:
        if isinstance(body, wire.Complete):
            self._links[target].fail("connection reset")
        else:
            send(self, target, body)

    monkeypatch.setattr(ControlEndpoint, "send", lost)
    prefill.manager.send(1, [0, 1, 2], 0)
    started = time.monotonic()
    prefill.manager.finish(1, aux(1))
    pair.run_until(lambda: bool(of(decode, Failed, 1)))
    assert time.monotonic() - started < 2 * pair.settings.heartbeat_interval
    assert "connection reset" in of(decode, Failed, 1)[0].reason
    assert of(prefill, Sent, 1)
    pair.run_until(lambda: bool(of(decode, Drained, 1)))
