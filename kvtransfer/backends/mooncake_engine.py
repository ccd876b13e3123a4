"""The calls we make on one Mooncake engine.

Measured (Mooncake 0.3.13, TCP, loopback): `get_batch_transfer_status` spins on a core until the batch is
final, and reports a failed batch while others of its descriptors are still being written. A batch of one,
submitted by `transfer_submit_write`, can be polled without waiting by `transfer_check_status`, is final
exactly when the wire is done with it, and moves more bytes a second (2.0 GB/s instead of 1.2 for 512 pages of
360 KiB).
"""

from __future__ import annotations

import enum
import os
import sys
from typing import Any

import msgspec
import torch

from diptych.kvtransfer.backends.interface import Endpoint
from diptych.kvtransfer.backends.mooncake_library import MooncakeSettings, configure, why_unavailable
from diptych.kvtransfer.errors import TransferError

_NO_METADATA_SERVER = "P2PHANDSHAKE"
_REFUSED = (0, (1 << 64) - 1)
"""Ids that stand for a failure: the type is unsigned, and it depends on the cause."""


class Progress(enum.Enum):
    IN_FLIGHT = 0
    DONE = 1
    FAILED = -1


_PROGRESS = {
    0: Progress.IN_FLIGHT,
    1: Progress.DONE,
    -1: Progress.FAILED,
    # A time-out of the library's own: the transfer is not final, and still may become so.
    -2: Progress.IN_FLIGHT,
}


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer needs to know: travels as the endpoint's metadata."""

    name: str
    """`host:port` of the engine's own handshake service."""
    protocol: str


class MooncakeEngine:
    """One engine with one registered slab. The library is safe to call from several threads."""

    def __init__(
        self, slab: torch.Tensor, *, page_bytes: int, agent: str, settings: MooncakeSettings
    ) -> None:
        """Raises `TransferError` when Mooncake can't be loaded or started, or refuses the memory."""
        # The environment before anything is loaded.
        configure(settings)
        problem = why_unavailable(settings.protocol)
        if problem is not None:
            raise TransferError(problem)
        from mooncake import engine

        if slab.is_cuda and not engine.SUPPORT_CUDA:
            raise TransferError(
                "the installed Mooncake is built without CUDA: on a CUDA machine install "
                "'diptych[mooncake-cuda]' instead of 'diptych[mooncake]'"
            )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self._engine: Any = engine.TransferEngine()
        with _NativeStderr() as said:
            status = self._engine.initialize(host, _NO_METADATA_SERVER, settings.protocol, settings.ib_device)
        if status != 0:
            raise TransferError(f"mooncake can't start on {host} over {settings.protocol}: {said.text}")
        self._address = slab.data_ptr()
        if self._engine.register_memory(self._address, slab.numel() * slab.element_size()) != 0:
            raise TransferError("mooncake refused to register the KV pool")
        self._scratch = torch.zeros(4096, dtype=torch.uint8)
        if self._engine.register_memory(self._scratch.data_ptr(), self._scratch.numel()) != 0:
            raise TransferError("mooncake refused to register memory")
        self.session = Session(name=f"{host}:{self._engine.get_rpc_port()}", protocol=settings.protocol)
        self.endpoint = Endpoint(
            backend="mooncake",
            agent=agent,
            metadata=msgspec.msgpack.encode(self.session),
            base_address=self._address,
            page_bytes=page_bytes,
            num_pages=slab.numel() * slab.element_size() // page_bytes,
        )

    def probe(self, session: str) -> bool:
        """Blocking, a minute when the peer is stopped; others may call meanwhile. Whether it answers."""
        return bool(self._engine.send_probe(session) == 0)

    def touch(self, session: str, address: int) -> int | None:
        """Start reading one byte at the peer's `address`, to connect and see that it serves; None: refused.
        Blocking on the first contact, and *every* submit waits with it: only after a probe."""
        here = self._scratch.data_ptr()
        transfer = int(self._engine.batch_transfer_async_read(session, [here], [address], [1]))
        return None if transfer in _REFUSED else transfer

    def submit(self, session: str, source: int, target: int, length: int) -> int | None:
        """Start writing `length` bytes at our address `source` to the peer's `target`; None: refused."""
        transfer = int(self._engine.transfer_submit_write(session, source, target, length))
        return None if transfer in _REFUSED else transfer

    def progress(self, transfer: int) -> Progress:
        """Ask once. A transfer that is final is freed and must not be asked about again."""
        return _PROGRESS[self._engine.transfer_check_status(transfer)]

    def close(self) -> None:
        """What is in flight is cut off."""
        self._engine.unregister_memory(self._address)
        self._engine.unregister_memory(self._scratch.data_ptr())
        del self._engine


class _NativeStderr:
    """Catches what the library says while it starts: a line of it is an error even when all is well."""

    text = ""

    def __enter__(self) -> _NativeStderr:
        sys.stderr.flush()
        self._caught = os.memfd_create("mooncake-start")
        self._stderr = os.dup(2)
        os.dup2(self._caught, 2)
        return self

    def __exit__(self, *_: object) -> None:
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        with os.fdopen(self._caught, "rb") as caught:
            caught.seek(0)
            lines = caught.read().decode("utf-8", "replace").splitlines()
        # glog's lines start with the level; the text follows the first "] ".
        errors = [line.partition("] ")[2] for line in lines if line.startswith("E")]
        self.text = "; ".join(errors) or "no reason given"
