"""What a bootstrap service stores and answers."""

from __future__ import annotations

from typing import Any

import msgspec

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer.backends.interface import Endpoint
from diptych.kvtransfer.identity import Identity


class RankRoute(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `PUT /route`: one prefill rank. All ranks of one start share `instance_id`."""

    version: int
    instance_id: str
    """Of the worker start as a whole; a new one replaces the old wholesale."""
    rank: int
    world_size: int
    identity: Identity
    """Of this rank's scheduler process."""
    control_address: str
    """`tcp://host:port` of the rank's control socket."""
    fingerprint: Fingerprint
    endpoint: Endpoint


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    identity: Identity
    control_address: str


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /route` once every rank has registered."""

    version: int
    instance_id: str
    fingerprint: Fingerprint
    backend: str
    ranks: list[RankAddress]
    """In rank order."""
    schedule: dict[str, Any] = {}
    """The prefill worker's published `schedule` bag."""
