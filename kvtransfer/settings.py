"""The numbers that bound a transfer, as plain arguments of the sender and the receiver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """Seconds, but for the last. Leaves of the `disagg` bag fill it; nothing here reads configuration."""

    handshake_timeout: float
    """Decode: from `open` until prefill's worker has accepted this one."""
    bootstrap_timeout: float
    """Prefill: from `open` until decode has reserved pages; decode: from the agreement until it has pages to
    reserve; also how long a reservation or a refusal that
    came before its request is kept."""
    receive_timeout: float
    """From the reservation until the last page is in place, prefill's queueing and compute included. Prefill
    allows two heartbeats more: it fails the room by itself only if decode's own time-out goes unheard."""
    transfer_timeout: float
    """Prefill: for every posted write to become final, counted from the last `send`."""
    heartbeat_interval: float
    """A silent or dead peer is seen within two of these."""
    checksum: bool = False
    """Decode: ask prefill for checksums of pages and aux block, and compare them. Prefill obliges whoever
    asks."""
