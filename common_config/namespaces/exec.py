"""How a step is computed: its kernels, its compilation, what it overlaps with, what its results promise."""

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


class Graph(Namespace):
    """How the model's code is turned into what runs."""

    enable_torch_compile: bool = leaf(
        False,
        help="Compile what surrounds attention in each layer with torch.compile, once at start. Meant for "
        "devices where plain PyTorch computes it: on a CPU, whose C++ kernels do the same, decode steps get "
        "slower.",
    )


class Overlap(Namespace):
    """What goes on at the same time."""

    disable_overlap_transfer: bool = leaf(
        False,
        help="Prefill sends a prompt's pages only once its last chunk is computed, rather than those of each "
        "chunk while the next is computed.",
    )


class Features(Namespace):
    """What the results of a step promise."""

    disable_batch_invariance: bool = leaf(
        False,
        help="Let a request's logits depend, in their last bits, on whether it runs alone: a step of one "
        "token is then not computed as two. A decode step of one request gets faster by about a tenth; one "
        "seed may draw other tokens alone than in company.",
    )


class GrammarFollowing(Namespace):
    """Output that must match a schema, a regular expression or a grammar."""

    grammar_backend: str = leaf(
        "xgrammar",
        help="The library that compiles and follows grammars. Where it isn't installed this becomes none, "
        "which refuses requests with a grammar.",
        choices=("xgrammar", "none"),
    )
    grammar_compile_timeout: float = leaf(
        10.0,
        help="Processor time that compiling one grammar may take before its requests are refused.",
        unit="seconds",
        gt=0,
        le=3600,
    )
    disable_any_whitespace: bool = leaf(
        False,
        help="JSON that follows a grammar is in one line, with one blank after each comma and colon (inside "
        "structural tags: at most one anywhere). Otherwise it has as much white space as the model likes, of "
        "which small models find no end. Set it alike on prefill and decode workers.",
    )


class Exec(Namespace):
    """How a step is computed."""

    kernel: Kernel = group()
    graph: Graph = group()
    overlap: Overlap = group()
    features: Features = group()
    grammar: GrammarFollowing = group()
