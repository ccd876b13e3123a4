"""Puts the faulty parts around the real ones."""

from __future__ import annotations

from dataclasses import replace

from diptych.kvtransfer.faults.backend import FaultyBackend
from diptych.kvtransfer.faults.control import FaultyControl
from diptych.kvtransfer.faults.injector import Injector
from diptych.kvtransfer.faults.lookup import FaultyLookup
from diptych.kvtransfer.parts import TransferParts
from diptych.kvtransfer.plane import FramePlane


def faulty_parts(parts: TransferParts, faults: Injector) -> TransferParts:
    """The same parts with faults injected. Their control plane must be a `FramePlane`."""
    assert isinstance(parts.control, FramePlane)
    return replace(
        parts,
        backend=FaultyBackend(parts.backend, faults),
        control=FaultyControl(parts.control, faults),
        lookup=FaultyLookup(parts.background, faults, parts.lookup.fetch_route),
    )
