"""Attention in C++ that reads K and V where they lie in their pages: no gather, float32 accumulation."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch

from diptych.kernels.cpu_build import load_cpu_kernels
from diptych.kernels.interface import AttentionBackend, AttentionStep

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Call(ctypes.Structure):
    """`AttentionCall` of csrc/attention.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slab",)),
        *(
            (name, ctypes.c_int64)
            for name in ("slab_type", "page_bytes", "layer", "kv_heads", "page_size", "head_dim")
        ),
        ("q", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("q_type", "q_stride", "q_heads")),
        *((name, ctypes.c_void_p) for name in ("k", "v")),
        *((name, ctypes.c_int64) for name in ("k_stride", "v_stride")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("tokens", "sequences")),
        *((name, ctypes.c_void_p) for name in ("query_lens", "seq_lens", "page_table")),
        ("table_width", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("token_pages", "token_offsets", "scratch")),
        ("scale", ctypes.c_double),
        ("threads", ctypes.c_int64),
    )


class CpuAttention(AttentionBackend):
    name: ClassVar[str] = "cpu"
    supports_chunked_prefix: ClassVar[bool] = True

    def __init__(self, slab: torch.Tensor, *, num_q_heads: int, scale: float) -> None:
        """Raises `KernelBuildError` if the kernels can't be compiled here."""
        super().__init__(slab, num_q_heads=num_q_heads, scale=scale)
        self._library = load_cpu_kernels()
        if self._library.diptych_call_bytes() != ctypes.sizeof(_Call):
            raise RuntimeError("csrc/attention.h and kernels/cpu.py describe different calls")
        if slab.device.type != "cpu" or not slab.is_contiguous():
            raise ValueError("the slab must be contiguous and on the CPU")
        _, _, _, self._kv_heads, page_size, self._head_dim = slab.shape
        self._call = _Call(
            slab=slab.data_ptr(),
            slab_type=_TYPES[slab.dtype],
            page_bytes=slab[0].numel() * slab.element_size(),
            kv_heads=self._kv_heads,
            page_size=page_size,
            head_dim=self._head_dim,
            q_heads=num_q_heads,
            scale=scale,
        )
        self._address = ctypes.addressof(self._call)
        self._is_decode = 0
        self._scratch = torch.empty(0)
        # The call holds bare addresses: these keep what they point at alive for the step.
        self._step: tuple[torch.Tensor, ...] = ()

    def begin_step(self, step: AttentionStep) -> None:
        query_lens, seq_lens = torch.tensor(step.query_lens), torch.tensor(step.seq_lens)
        table = step.page_table.contiguous()
        pages, offsets = step.token_pages.contiguous(), step.token_offsets.contiguous()
        self._step = (query_lens, seq_lens, table, pages, offsets)
        call = self._call
        call.tokens, call.sequences, call.table_width = len(pages), len(step.seq_lens), table.shape[1]
        call.query_lens, call.seq_lens = query_lens.data_ptr(), seq_lens.data_ptr()
        call.page_table = table.data_ptr()
        call.token_pages, call.token_offsets = pages.data_ptr(), offsets.data_ptr()
        call.threads = torch.get_num_threads()
        self._is_decode = int(step.is_decode)
        floats = self._library.diptych_scratch_floats(self._address, self._is_decode)
        if floats > len(self._scratch):
            self._scratch = torch.empty(floats)
        call.scratch = self._scratch.data_ptr()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dtype = q.dtype
        if dtype == torch.float16:
            q = q.to(torch.float32)
        q, k, v = _dense_rows(q), _dense_rows(k.to(self.slab.dtype)), _dense_rows(v.to(self.slab.dtype))
        out = torch.empty(q.shape[0], self.num_q_heads * self._head_dim, dtype=q.dtype)
        call = self._call
        call.layer = layer
        call.q, call.q_type, call.q_stride = q.data_ptr(), _TYPES[q.dtype], q.stride(0)
        call.k, call.k_stride = k.data_ptr(), k.stride(0)
        call.v, call.v_stride = v.data_ptr(), v.stride(0)
        call.out = out.data_ptr()
        self._library.diptych_attend(self._address, self._is_decode)
        return out.to(dtype)


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """[N, heads, head_dim] whose heads lie side by side; rows may be a slice of wider ones."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()
