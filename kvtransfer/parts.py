"""What one side of page transfer is made of: the sender and the receiver are built from the same things."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from diptych.engine.background import BackgroundPool
from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer.backends.interface import TransferBackend
from diptych.kvtransfer.bootstrap.client import RouteLookup, fetch_route
from diptych.kvtransfer.checksum import PageChecksums
from diptych.kvtransfer.cluster import ClusterKeys
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.plane import ControlPlane
from diptych.kvtransfer.probe import DeathProbe, proof_of_death
from diptych.kvtransfer.settings import TransferSettings
from diptych.kvtransfer.stats import TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferParts:
    """Owned, and closed, by the sender or receiver that is built from it."""

    backend: TransferBackend
    checksums: PageChecksums
    """Over the slab that the backend has."""
    control: ControlPlane
    fingerprint: Fingerprint
    identity: Identity
    settings: TransferSettings
    stats: TransferStats
    background: BackgroundPool
    lookup: RouteLookup
    """Decode's way to a prefill worker's route."""
    probe: DeathProbe
    clock: Callable[[], float] = time.monotonic
    """Seconds; every deadline is on it."""

    def close(self) -> None:
        """Sockets first, so that last words leave; then the library, then the threads. Idempotent."""
        self.control.close()
        self.backend.close()
        self.background.close()


def real_parts(
    *,
    backend: TransferBackend,
    checksums: PageChecksums,
    control: ControlPlane,
    fingerprint: Fingerprint,
    identity: Identity,
    settings: TransferSettings,
    stats: TransferStats,
    keys: ClusterKeys | None = None,
) -> TransferParts:
    """The parts of a worker process: HTTP look-ups and probes in a few threads, and the real clock. The
    control plane has `keys` already."""
    background = BackgroundPool(threads=4, name="bootstrap")
    return TransferParts(
        backend=backend,
        checksums=checksums,
        control=control,
        fingerprint=fingerprint,
        identity=identity,
        settings=settings,
        stats=stats,
        background=background,
        lookup=RouteLookup(background, partial(fetch_route, keys=keys)),
        probe=DeathProbe(background, partial(proof_of_death, keys=keys)),
    )
