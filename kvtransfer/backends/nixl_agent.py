"""Loading NIXL with settings that fit, and the calls we make on one agent.

Measured (NIXL 1.5, loopback): its progress thread spins at 50 to 100 % of a core even when idle, so it stays
off. Without it the *target* has to call into NIXL as well: for the first transfer of a pair over any
transport, and for every transfer over TCP.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diptych.kvtransfer.backends.interface import Endpoint
from diptych.kvtransfer.errors import TransferError

CPU_UCX_TLS = "cma,tcp,self"
"""Same host: cross-memory attach, no shared-memory files. Across hosts: TCP."""


def configure_ucx(*, on_cpu: bool, ucx_tls: str | None, loopback: bool, verbose: bool) -> str:
    """Set UCX's environment before it is loaded; returns the transports in words, for the log. The user's
    flag wins, then the user's environment; we choose only for a CPU slab on a machine without RDMA.
    `loopback`: all peers are on this host, so UCX must not listen on the network. `verbose`: UCX says, once
    for each kind of connection, which transports it uses; NIXL has no way to ask."""
    if ucx_tls:
        os.environ["UCX_TLS"] = ucx_tls
    elif on_cpu and "UCX_TLS" not in os.environ and not _has_rdma():
        os.environ["UCX_TLS"] = CPU_UCX_TLS
        if loopback:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
    # Both log to standard output, which belongs to whoever launched us.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    if verbose:
        os.environ.setdefault("UCX_LOG_LEVEL", "info")
    return os.environ.get("UCX_TLS", "chosen by UCX")


def _has_rdma() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


class NixlAgent:
    """One NIXL agent with one registered slab. Every call from one thread, except the constructor, which may
    run in another before. Whatever NIXL raises leaves here as a `TransferError`."""

    def __init__(self, slab: torch.Tensor, *, page_bytes: int, name: str) -> None:
        try:
            from nixl import _bindings
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise TransferError(f"the nixl package can't be loaded: {error}") from error
        # The binding's own errors share no base class short of Exception.
        self._errors: tuple[type[Exception], ...] = (
            RuntimeError,
            ValueError,
            *(e for e in vars(_bindings).values() if isinstance(e, type) and issubclass(e, Exception)),
        )
        with self._translated():
            config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = nixl_agent(name, config)
            self._register(slab, page_bytes)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransferError(f"nixl: {error or type(error).__name__}") from error

    def _register(self, slab: torch.Tensor, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._memory = "VRAM" if slab.is_cuda else "DRAM"
        self._device = slab.get_device() if slab.is_cuda else 0
        self._address = slab.data_ptr()
        self._num_pages = slab.numel() * slab.element_size() // page_bytes
        self._registered = self._agent.register_memory(
            [(self._address, self._num_pages * page_bytes, self._device, "")], self._memory
        )
        self._local = self._page_list("NIXL_INIT_AGENT", self._address, self._num_pages)
        self._remote: dict[str, tuple[str, Any]] = {}

    def _page_list(self, agent: str, address: int, num_pages: int) -> Any:
        """A prepared list with one descriptor per page; NIXL joins adjacent ones when they are used."""
        strided = np.array(
            [[address, self._page_bytes, self._device, self._page_bytes, num_pages]], dtype=np.uint64
        )
        return self._agent.prep_xfer_dlist(agent, strided, self._memory)

    def endpoint(self) -> Endpoint:
        return Endpoint(
            backend="nixl",
            agent=self._agent.name,
            metadata=self._agent.get_agent_metadata(),
            base_address=self._address,
            page_bytes=self._page_bytes,
            num_pages=self._num_pages,
        )

    def add_peer(self, peer: str, endpoint: Endpoint) -> None:
        with self._translated():
            name = self._agent.add_remote_agent(endpoint.metadata)
            name = name.decode() if isinstance(name, bytes) else name
            self._remote[peer] = (name, self._page_list(name, endpoint.base_address, endpoint.num_pages))
            # The lanes are wired up by the first message; better now than under the first pages.
            self._agent.send_notif(name, b"wire-up")

    def has_peer(self, peer: str) -> bool:
        return peer in self._remote

    def remove_peer(self, peer: str) -> None:
        name, pages = self._remote.pop(peer)
        with self._translated():
            self._agent.release_dlist_handle(pages)
            self._agent.remove_remote_agent(name)

    def write(self, peer: str, src_pages: Sequence[int], dst_pages: Sequence[int]) -> tuple[Any, str]:
        """Post; returns the transfer handle and its state."""
        with self._translated():
            handle = self._agent.make_prepped_xfer(
                "WRITE",
                self._local,
                np.asarray(src_pages, dtype=np.int32),
                self._remote[peer][1],
                np.asarray(dst_pages, dtype=np.int32),
            )
            return handle, str(self._agent.transfer(handle))

    def state(self, handle: Any) -> str:
        """`DONE`, `PROC` or `ERR`."""
        with self._translated():
            return str(self._agent.check_xfer_state(handle))

    def release(self, handle: Any) -> None:
        """Raises `TransferError` while the library can't let go of an active transfer."""
        with self._translated():
            self._agent.release_xfer_handle(handle)

    def progress(self) -> None:
        """Let UCX work: serve peers' writes and our own. Notifications are not used; drop them."""
        with self._translated():
            self._agent.get_new_notifs()

    def close(self) -> None:
        """All transfer handles must have been released."""
        for peer in list(self._remote):
            self.remove_peer(peer)
        with self._translated():
            self._agent.release_dlist_handle(self._local)
            self._agent.deregister_memory(self._registered)
        del self._agent
