"""How much memory the KV pool takes, and what it stores."""

from __future__ import annotations

from diptych.common_config.declare import Namespace, leaf
from diptych.common_config.namespaces.model import DTYPES


class Memory(Namespace):
    """How much memory the KV pool takes, and what it stores."""

    mem_fraction_static: float = leaf(
        0.3,
        help="Size of the KV pool: on a CPU this share of the memory that is available once the weights are "
        "loaded; on CUDA weights and pool together take this share of the device's memory.",
        gt=0,
        le=0.95,
    )
    max_total_tokens: int | None = leaf(
        None,
        help="Capacity of the KV pool.",
        unit="tokens",
        ge=1,
        open_means="sized from --mem-fraction-static",
    )
    kv_cache_dtype: str = leaf(
        "auto",
        help="What KV pages store; auto takes the model's dtype. Prefill and decode must agree on it.",
        choices=DTYPES,
    )
    disable_radix_cache: bool = leaf(False, help="Never reuse KV pages of a common prefix between requests.")
