"""Speculative decoding: a namespace of its own; nothing reads a leaf of it yet, so it declares none."""

from __future__ import annotations

from diptych.common_config.declare import Namespace


class Spec(Namespace):
    """Speculative decoding."""
