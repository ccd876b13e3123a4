"""Which kernels run."""

from __future__ import annotations

from typing import NamedTuple

from diptych.common_config.declare import Derived, Namespace, group, leaf

ATTENTION_BACKENDS = ("torch_native", "cpu")
"""Every attention backend that exists: the one list that flags are checked against."""


class AttentionPair(NamedTuple):
    """The attention backend asked for each half; None leaves that half to the runner, which stamps what it
    constructed."""

    prefill: str | None
    decode: str | None


def attention_pair(view: Kernel) -> AttentionPair:
    return AttentionPair(
        prefill=view.prefill_attention_backend or view.attention_backend,
        decode=view.decode_attention_backend or view.attention_backend,
    )


class Kernel(Namespace):
    """Which kernels run."""

    attention_backend: str | None = leaf(
        None,
        help="Attention of both halves, where a half isn't named on its own.",
        choices=ATTENTION_BACKENDS,
        open_means="the runner's choice for the device",
    )
    prefill_attention_backend: str | None = leaf(
        None,
        help="Attention of prefill steps.",
        choices=ATTENTION_BACKENDS,
        open_means="--attention-backend",
    )
    decode_attention_backend: str | None = leaf(
        None,
        help="Attention of decode steps.",
        choices=ATTENTION_BACKENDS,
        open_means="--attention-backend",
    )
    linear_backend: str = leaf(
        "auto",
        help="Linear layers: plain PyTorch or oneDNN with prepacked weights; auto takes the faster one.",
        choices=("auto", "plain", "onednn"),
    )
    attention_backends: AttentionPair = Derived(
        attention_pair,
        help="The attention asked for (prefill, decode), each falling back to --attention-backend. Read "
        "this, never the three flags: a launch may name only a half.",
    )


class Exec(Namespace):
    """How a step is computed."""

    kernel: Kernel = group()
