"""Who may connect to a control port of a worker with a cluster secret.

libzmq asks an authenticator inside the process (ZAP, https://rfc.zeromq.org/spec/27/) whether a client may
connect that has proven to own a public key, and reports handshakes that failed before that to a monitor. Both
are served by a thread of their own, so that a handshake never waits for a step of the scheduler.
"""

from __future__ import annotations

import hmac
import logging
import threading

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from diptych.kvtransfer.cluster import ClusterKeys, Refusals, set_key
from diptych.kvtransfer.stats import TransferStats

logger = logging.getLogger(__name__)

_ZAP = "inproc://zeromq.zap.01"
_MONITOR = "inproc://diptych-control-monitor"
_DOMAIN = b"diptych"
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "the peer has no --cluster-secret",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "the peer has another --cluster-secret",
}


class Gatekeeper:
    """Of the one listening socket of a ZMQ context, before it is bound. Ends when the context does."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listener: zmq.Socket[bytes],
        keys: ClusterKeys,
        stats: TransferStats,
    ) -> None:
        self._allowed = z85.decode(keys.connecting.public)
        what, count = "a connection to the control port was", stats.connections_refused.inc
        self._refusals = Refusals(what, logger, count)
        # Also who only looks whether the port is open, as a death probe of a peer does.
        self._unfinished = Refusals(what, logger, count, level=logging.INFO)
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP)
        set_key(listener, keys.listening)
        listener.setsockopt(zmq.CURVE_SERVER, 1)
        listener.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        # Without this a client is let in where nobody answers for the domain.
        listener.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        listener.monitor(_MONITOR, _FAILED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(_MONITOR)
        threading.Thread(target=self._run, name="control gatekeeper", daemon=True).start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    if socket is self._zap:
                        self._answer()
                    else:
                        self._failed()
        except zmq.ContextTerminated:
            logger.debug("the control port is closed")
        finally:
            self._zap.close()
            self._monitor.close()

    def _answer(self) -> None:
        version, request, _domain, _address, _identity, mechanism, *credentials = self._zap.recv_multipart()
        known = mechanism == b"CURVE" and hmac.compare_digest(b"".join(credentials), self._allowed)
        verdict = [b"200", b"OK"] if known else [b"400", b"unknown key"]
        self._zap.send_multipart([version, request, *verdict, b"", b""])

    def _failed(self) -> None:
        event = recv_monitor_message(self._monitor)
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refusals.add("the peer's key is not the cluster's")
        elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._unfinished.add("the peer left, or fell silent, before it had proven the --cluster-secret")
        else:
            self._refusals.add(_REASONS.get(event["value"], "the peer speaks another protocol"))
