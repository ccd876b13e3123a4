"""Talking to a bootstrap service: a rank registers, a peer looks up."""

from __future__ import annotations

from diptych.kvtransfer.bootstrap.route import RankRoute


def register(host: str, port: int, route: RankRoute, *, timeout: float) -> None:
    """Blocking `PUT /route`, retried for `timeout` seconds while the service isn't up yet.
    Raises `TransferError` with the reason."""
    raise NotImplementedError
