"""Allocates the memory of a KV pool."""

from __future__ import annotations

import mmap

import torch

from diptych.engine.kv_layout import KVLayout


def allocate_slab(layout: KVLayout, num_pages: int, device: torch.device) -> torch.Tensor:
    """`[num_pages, num_layers, 2(K,V), kv_heads, page_size, head_dim]`, all zeros.

    Zeros, not garbage: masked positions still enter the value product, and 0 · NaN is NaN.
    """
    shape = (num_pages, layout.num_layers, 2, layout.kv_heads, layout.page_size, layout.head_dim)
    dtype = getattr(torch, layout.dtype)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous memory is zero and takes no memory until it is touched; torch.zeros writes all of it, which
    # for two pools of 6.6 GB took 12 of 15 seconds of start-up and kept 13 GB from everybody else. Huge pages
    # make the first touch one fault per 2 MiB.
    memory = mmap.mmap(-1, num_pages * layout.page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
