"""Which attention backends exist on this machine, and which one a name means."""

from __future__ import annotations

import torch

from diptych.kernels.cpu import CpuAttention
from diptych.kernels.cpu_build import cpu_kernels_available
from diptych.kernels.interface import AttentionBackend
from diptych.kernels.torch_native import TorchNativeAttention


class UnknownBackendError(ValueError):
    """The name asked for isn't available here; the message lists what is."""


def available_attention_backends(device: torch.device | str) -> list[str]:
    """Concrete names that can be constructed for a slab on `device`, the preferred one first.

    On a CPU the first call on a machine compiles the C++ kernels (a few seconds); where that fails, a log
    line says why and `torch_native` is what remains.
    """
    if torch.device(device).type == "cpu" and cpu_kernels_available():
        return [CpuAttention.name, TorchNativeAttention.name]
    return [TorchNativeAttention.name]


def resolve_attention_backend(name: str | None, device: torch.device | str) -> str:
    """None or `auto` → the preferred backend of `device`. Raises `UnknownBackendError`."""
    if name == TorchNativeAttention.name:
        return name
    available = available_attention_backends(device)
    if name is None or name == "auto":
        return available[0]
    if name not in available:
        raise UnknownBackendError(
            f"attention backend {name!r} is not available on {device}; available: {', '.join(available)}"
        )
    return name


def make_attention_backend(
    name: str, slab: torch.Tensor, *, num_q_heads: int, scale: float
) -> AttentionBackend:
    """`slab`: [num_pages, num_layers, 2, kv_heads, page_size, head_dim], zeroed. Raises
    `UnknownBackendError`."""
    concrete = resolve_attention_backend(name, slab.device)
    kind = CpuAttention if concrete == CpuAttention.name else TorchNativeAttention
    return kind(slab, num_q_heads=num_q_heads, scale=scale)
