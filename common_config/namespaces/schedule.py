"""How requests share steps. The scheduler, the KV pool and the transfer path all read this namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.common_config.declare import Derived, Namespace, leaf

if TYPE_CHECKING:
    from diptych.common_config.record import LaunchConfig

WHOLE_PROMPT_BUDGET = 16384
"""Tokens of a prefill step without chunking when the context length is the model's own."""


def chunked_prefill_enabled(view: LaunchConfig) -> bool:
    return view.chunked_prefill_size > 0 and not view.disable_chunked_prefix_cache


def prefill_token_budget(view: LaunchConfig) -> int:
    return view.chunked_prefill_size if chunked_prefill_enabled(view) else whole_prompt_budget(view)


def whole_prompt_budget(view: LaunchConfig) -> int:
    return view.context_length or WHOLE_PROMPT_BUDGET


class Schedule(Namespace):
    """How requests share steps, and the pages they occupy."""

    page_size: int = leaf(
        16, help="Size of a KV page. Prefill and decode must agree on it.", unit="tokens", ge=1, le=4096
    )
    chunked_prefill_size: int = leaf(
        512,
        help="Most prompt tokens in one prefill step; longer prompts take several. -1 turns chunking off.",
        unit="tokens",
        ge=1,
        also=(-1,),
    )
    max_running_requests: int = leaf(
        64, help="Most requests that run at once.", unit="requests", ge=1, le=65536
    )
    max_queued_requests: int = leaf(
        1024, help="Most requests that wait; more are refused with 429.", unit="requests", ge=1
    )
    disable_chunked_prefix_cache: bool = leaf(
        False,
        help="Never attend to a prefix stored by earlier chunks, which turns chunked prefill off.",
    )
    num_reserved_decode_tokens: int = leaf(
        64,
        help="Room for output that decode keeps free for each running request when it admits another.",
        unit="tokens",
        ge=0,
    )
    chunked_prefill_enabled: bool = Derived(
        chunked_prefill_enabled,
        help="Whether prompts are split into chunks: a chunk size is set and prefix chunks may be cached.",
    )
    prefill_token_budget: int = Derived(
        prefill_token_budget,
        help="Tokens that a prefill step may hold: the chunk size; without chunking the context length (or "
        f"{WHOLE_PROMPT_BUDGET} where the model decides it), and one longer prompt still goes whole.",
    )
