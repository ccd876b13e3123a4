"""What surrounds the matrix products of a layer: RMSNorm, SiLU gating, rotary embedding.

On a CPU each of them in plain PyTorch is several passes over memory and several dispatches; the C++ forms are
one pass and one call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F

from diptych.kernels.cpu_build import cpu_kernels_available, load_cpu_kernels


class PointwiseOps(ABC):
    """Stateless. Tensors of one call share their dtype (but for what is said to be float32) and device."""

    name: ClassVar[str]

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x` [..., C], `weight` [C] float32 → [..., C] (Zhang and Sennrich 2019), computed in float32."""

    @abstractmethod
    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds `delta` [N, C] to `residual` [N, C] float32 in place, then normalises the sum: [N, C] in
        `delta`'s dtype. `weight` [C] float32."""

    @abstractmethod
    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[N, 2 · C], gate then up → silu(gate) · up, [N, C]."""

    @abstractmethod
    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`x` [N, heads, D]; `cos` and signed `sin` [N, 1, D] float32, as from `RotaryEmbedding.table`."""


class TorchPointwise(PointwiseOps):
    name: ClassVar[str] = "torch_native"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x.to(torch.float32), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return F.rms_norm(residual.add_(delta), weight.shape, weight, eps).to(delta.dtype)

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, 1)
        return F.silu(gate).mul_(up)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return (x * cos).addcmul_(x.roll(x.shape[2] // 2, -1), sin).to(x.dtype)


class CpuPointwise(PointwiseOps):
    """float32 and bfloat16."""

    name: ClassVar[str] = "cpu"

    def __init__(self) -> None:
        """Raises `KernelBuildError`."""
        library = load_cpu_kernels()
        self._rms_norm = library.diptych_rms_norm
        self._add_rms_norm = library.diptych_add_rms_norm
        self._silu = library.diptych_silu_and_multiply
        self._rotate = library.diptych_rotate

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        columns = x.shape[-1]
        kind, threads = x.dtype == torch.bfloat16, torch.get_num_threads()
        rows = x.numel() // columns
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, columns, eps, kind, threads)
        return out

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        delta = delta.contiguous()
        out = torch.empty_like(delta)
        rows, columns = delta.shape
        self._add_rms_norm(
            residual.data_ptr(),
            delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            columns,
            eps,
            delta.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return out

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, both = gate_up.shape
        out = gate_up.new_empty(rows, both // 2)
        kind, threads = gate_up.dtype == torch.bfloat16, torch.get_num_threads()
        self._silu(gate_up.contiguous().data_ptr(), out.data_ptr(), rows, both // 2, kind, threads)
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, heads, dim = x.shape
        if x.stride(2) != 1 or x.stride(1) != dim:
            x = x.contiguous()
        out = x.new_empty(rows, heads, dim)
        self._rotate(
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
            rows,
            x.stride(0),
            heads,
            dim,
            x.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return out


def make_pointwise(device: torch.device, dtype: torch.dtype) -> PointwiseOps:
    """The fastest that this machine has."""
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and cpu_kernels_available():
        return CpuPointwise()
    return TorchPointwise()
