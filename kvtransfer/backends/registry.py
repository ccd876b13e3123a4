"""Backends by the name users give to `--disaggregation-transfer-backend`."""

from __future__ import annotations

import torch

from diptych.kvtransfer.backends.fake import FakeBackend, FakeFabric
from diptych.kvtransfer.backends.interface import TransferBackend
from diptych.kvtransfer.backends.nixl import NixlBackend
from diptych.kvtransfer.errors import TransferError

BACKEND_NAMES = ("nixl", "fake")


def make_backend(
    name: str,
    slab: torch.Tensor,
    *,
    page_bytes: int,
    agent: str,
    ucx_tls: str | None = None,
    loopback: bool = False,
    fabric: FakeFabric | None = None,
) -> TransferBackend:
    """`ucx_tls`: the user's choice of UCX transports and `loopback`: nobody reaches this worker over the
    network (`nixl`); `fabric`: what joins `fake` backends. Raises `TransferError` for an unknown name or a
    library that isn't installed."""
    if name == "nixl":
        return NixlBackend(slab, page_bytes=page_bytes, agent=agent, ucx_tls=ucx_tls, loopback=loopback)
    if name == "fake":
        return FakeBackend(slab, page_bytes=page_bytes, agent=agent, fabric=fabric or FakeFabric())
    raise TransferError(f"unknown transfer backend {name!r}; known: {', '.join(BACKEND_NAMES)}")
