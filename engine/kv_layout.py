"""The shape of a KV page: what two clusters must agree on before a page may travel between them."""

from __future__ import annotations

import msgspec


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Page-first: one page of all layers is one contiguous byte range,
    `[num_layers, 2(K,V), kv_heads, page_size, head_dim]`."""

    num_layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    """Tokens per page."""
    dtype: str
    """`bfloat16`, `float16` or `float32`."""

    @property
    def itemsize(self) -> int:
        return {"bfloat16": 2, "float16": 2, "float32": 4}[self.dtype]

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything prefill and decode must agree on. Compared field by field so that a mismatch can name
    each differing field with both values."""

    model: str
    """Identity of the weights: a digest of the model's configuration and weight file names and sizes,
    never a local path."""
    dtype: str
    kv_dtype: str
    num_layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    vocab_size: int
    layout: str = "page-first/1"

    def differences(self, other: Fingerprint, *, here: str = "here", there: str = "at the peer") -> list[str]:
        """`["page_size: 16 here, 32 at the peer", …]`; empty when equal."""
        theirs = msgspec.structs.asdict(other)
        return [
            f"{name}: {mine} {here}, {theirs[name]} {there}"
            for name, mine in msgspec.structs.asdict(self).items()
            if mine != theirs[name]
        ]
