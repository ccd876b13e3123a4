"""Backends by the name users give to `--disaggregation-transfer-backend`."""

from __future__ import annotations

import torch

from diptych.kvtransfer.backends.fake import FakeBackend, FakeFabric
from diptych.kvtransfer.backends.interface import TransferBackend
from diptych.kvtransfer.backends.mooncake import MooncakeBackend
from diptych.kvtransfer.backends.mooncake_library import MooncakeSettings
from diptych.kvtransfer.backends.nixl import NixlBackend
from diptych.kvtransfer.errors import TransferError

BACKEND_NAMES = ("nixl", "mooncake", "fake")


def make_backend(
    name: str,
    slab: torch.Tensor,
    *,
    page_bytes: int,
    agent: str,
    ucx_tls: str | None = None,
    loopback: bool = False,
    mooncake: MooncakeSettings | None = None,
    fabric: FakeFabric | None = None,
) -> TransferBackend:
    """`ucx_tls`: the user's choice of UCX transports and `loopback`: nobody reaches this worker over the
    network (`nixl`); `mooncake`: loopback TCP where None; `fabric`: what joins `fake` backends. Raises
    `TransferError` for an unknown name or a library that can't be used here."""
    if name == "nixl":
        return NixlBackend(slab, page_bytes=page_bytes, agent=agent, ucx_tls=ucx_tls, loopback=loopback)
    if name == "mooncake":
        settings = mooncake or MooncakeSettings(host="127.0.0.1")
        return MooncakeBackend(slab, page_bytes=page_bytes, agent=agent, settings=settings)
    if name == "fake":
        return FakeBackend(slab, page_bytes=page_bytes, agent=agent, fabric=fabric or FakeFabric())
    raise TransferError(f"unknown transfer backend {name!r}; known: {', '.join(BACKEND_NAMES)}")
