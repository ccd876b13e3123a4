"""What the workers of one cluster prove to each other with, all derived from `--cluster-secret`.

Control channels are ZMQ CURVE (Curve25519, each message encrypted and authenticated, replays refused): every
worker listens with one key pair and connects with another, both the same on all of them, so that either side
shows the other that it has the secret. The bootstrap service and who asks it sign requests and answers; see
`bootstrap/signing.py`. A process that has the secret is trusted: nothing tells two of them apart.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from diptych.httpserver.throttle import Throttle

_SALT = b"diptych cluster secret 1"
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One Curve25519 pair, as ZMQ takes them."""

    public: bytes
    secret: bytes

    @classmethod
    def of(cls, seed: bytes) -> CurveKeys:
        secret = z85.encode(seed)
        return cls(zmq.curve_public(secret), secret)


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    listening: CurveKeys
    connecting: CurveKeys
    signing: bytes

    @classmethod
    def from_secret(cls, secret: str) -> ClusterKeys:
        """Takes a tenth of a second on purpose, so that who has recorded traffic can't try many secrets."""
        seeds = hashlib.scrypt(
            secret.encode(), salt=_SALT, n=1 << 14, r=8, p=1, dklen=3 * _KEY_BYTES, maxmem=64 << 20
        )
        first, second, third = (seeds[i : i + _KEY_BYTES] for i in range(0, len(seeds), _KEY_BYTES))
        return cls(CurveKeys.of(first), CurveKeys.of(second), third)


def set_key(socket: zmq.Socket[bytes], own: CurveKeys) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)


class Refusals:
    """Counts what came without the secret, and says so now and then."""

    def __init__(
        self,
        what: str,
        logger: logging.Logger,
        count: Callable[[], None],
        *,
        level: int = logging.WARNING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._logger = logger
        self._count = count
        self._level = level
        self._throttle = Throttle(clock)

    def add(self, why: str) -> None:
        self._count()
        unsaid = self._throttle.admit()
        if unsaid is None:
            return
        earlier = f" (and {unsaid} before it)" if unsaid else ""
        self._logger.log(self._level, "%s refused%s: %s", self._what, earlier, why)
