"""How the bootstrap service and who asks it prove the cluster secret to each other, over plain HTTP.

    GET /challenge                       → {"challenge": C}, drawn anew when the service starts
    PUT or GET /route, with nonce N and  M = HMAC(key, "request", C, N, method, path, body)
                                         → the answer, with HMAC(key, "answer", N, status, body)

C ties a request to this start of the service and N the answer to the request, so neither can be played again
elsewhere; a registration's N is taken once.
"""

from __future__ import annotations

import hmac

CHALLENGE = "/challenge"
NONCE_HEADER = "X-Diptych-Nonce"
MAC_HEADER = "X-Diptych-Mac"
NONCE_CHARS = 32
"""Hexadecimal digits."""


def request_mac(key: bytes, challenge: str, nonce: str, method: str, path: str, body: bytes) -> str:
    return _mac(key, b"request", challenge.encode(), nonce.encode(), method.encode(), path.encode(), body)


def answer_mac(key: bytes, nonce: str, status: int, body: bytes) -> str:
    return _mac(key, b"answer", nonce.encode(), str(status).encode(), body)


def _mac(key: bytes, *parts: bytes) -> str:
    """Of parts with their lengths, so that no two lists of parts look alike."""
    digest = hmac.new(key, digestmod="sha256")
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def same(given: str, expected: str) -> bool:
    """In constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())
