"""Speculative decoding."""

from __future__ import annotations

from diptych.common_config.declare import Namespace, leaf

SPECULATIVE_ALGORITHMS = ("none",)
"""Every algorithm that exists: the one list that the flag is checked against."""


class Spec(Namespace):
    """Speculative decoding."""

    speculative_algorithm: str = leaf(
        "none",
        help="What drafts tokens ahead of the model. Nothing does so far: a decode step gives each request "
        "one token.",
        choices=SPECULATIVE_ALGORITHMS,
    )
