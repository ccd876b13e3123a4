"""What a bootstrap service stores and answers."""

from __future__ import annotations

from typing import Any

import msgspec

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer.identity import Identity


class RankRoute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `PUT /route`: one prefill rank."""

    version: int
    worker_id: str
    """One per worker start, shared by its ranks; a new one replaces the old wholesale."""
    rank: int
    world_size: int
    identity: Identity
    """Of this rank's scheduler process."""
    control_address: str
    """`tcp://host:port` of the rank's control socket."""
    fingerprint: Fingerprint
    backend: str
    """Name of the transfer backend; both sides must use the same."""
    published: dict[str, dict[str, Any]] = {}
    """The scheduler's effective bags that a peer may know, by namespace, with nothing secret in them."""

    def with_weights(self, fingerprint: Fingerprint) -> RankRoute:
        """The registration of the same process once it serves other weights."""
        return msgspec.structs.replace(
            self, worker_id=f"{self.identity.instance_id}:{fingerprint.model}", fingerprint=fingerprint
        )

    def problem(self) -> str | None:
        """Why the values can't be, or None."""
        if not 1 <= self.world_size <= 65536:
            return f"world_size: {self.world_size} is not between 1 and 65536"
        if not 0 <= self.rank < self.world_size:
            return f"rank: {self.rank} is not below world_size {self.world_size}"
        if not self.worker_id:
            return "worker_id: empty"
        if not self.control_address.startswith("tcp://"):
            return f"control_address: {self.control_address!r} is not tcp://host:port"
        return None


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    identity: Identity
    control_address: str


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /route` once every rank has registered."""

    version: int
    worker_id: str
    fingerprint: Fingerprint
    backend: str
    ranks: list[RankAddress]
    """In rank order."""
    published: dict[str, dict[str, Any]] = {}
    """Rank 0's published bags: `schedule` and `disagg`. For a look: what must agree is in the fingerprint."""
