"""The transfer library alone, between two processes: one descriptor, nothing of ours on the way. And memcpy.

    python -m diptych.bench.transfer_raw target|source nixl|mooncake NUM_BYTES

The target holds memory; the source writes into it, and copies within its own. JSON lines as in
`transfer_worker.py`. Preparing a transfer is left out of its time: this is the best that the library does.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import select
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from diptych.bench.processes import calls_from_stdin
from diptych.kvtransfer.backends.mooncake_library import MooncakeSettings, configure
from diptych.kvtransfer.backends.nixl_agent import configure_ucx

HOST = "127.0.0.1"


def memory(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Like a worker's slab: anonymous, in huge pages where there are any; every page of it touched."""
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(area, dtype=np.uint8)
    array[:] = 1
    return array


class Library(ABC):
    """One process's end of it."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = memory(num_bytes)
        self.address: int = self.memory.ctypes.data

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """What the other end's `connect` needs."""

    @abstractmethod
    def connect(self, peer: dict[str, Any]) -> None: ...

    @abstractmethod
    def write(self, num_bytes: int, repeats: int) -> list[float]:
        """Seconds of each write of our first bytes onto the peer's."""

    @abstractmethod
    def progress(self) -> None:
        """What a target may have to do for writes to arrive."""

    @abstractmethod
    def close(self) -> None: ...


class Nixl(Library):
    """The same settings as the `nixl` backend's."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        configure_ucx(on_cpu=True, ucx_tls=None, loopback=True, verbose=False)
        from nixl._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = nixl_agent(f"raw-{time.monotonic_ns()}", config)
        self._registered = self._agent.register_memory([(self.address, num_bytes, 0, "")], "DRAM")
        self._peer = ""
        self._peer_address = 0

    def describe(self) -> dict[str, object]:
        blob = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": blob, "address": self.address}

    def connect(self, peer: dict[str, Any]) -> None:
        name = self._agent.add_remote_agent(base64.b64decode(peer["metadata"]))
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._peer_address = peer["address"]

    def write(self, num_bytes: int, repeats: int) -> list[float]:
        local = self._agent.get_xfer_descs([(self.address, num_bytes, 0)], "DRAM")
        remote = self._agent.get_xfer_descs([(self._peer_address, num_bytes, 0)], "DRAM")
        handle = self._agent.initialize_xfer("WRITE", local, remote, self._peer)
        seconds = []
        for _ in range(repeats):
            started = time.monotonic()
            state = self._agent.transfer(handle)
            while state == "PROC":
                state = self._agent.check_xfer_state(handle)
            seconds.append(time.monotonic() - started)
            assert state == "DONE", state
        self._agent.release_xfer_handle(handle)
        return seconds

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def close(self) -> None:
        if self._peer:
            self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)
        del self._agent


class Mooncake(Library):
    """The same settings as the `mooncake` backend's."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        # While it starts it logs an error although all is well.
        os.environ.setdefault("GLOG_minloglevel", "3")
        configure(MooncakeSettings(host=HOST))
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        assert self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
        assert self._engine.register_memory(self.address, num_bytes) == 0
        self._peer = ""
        self._peer_address = 0

    def describe(self) -> dict[str, object]:
        return {"session": f"{HOST}:{self._engine.get_rpc_port()}", "address": self.address}

    def connect(self, peer: dict[str, Any]) -> None:
        self._peer, self._peer_address = peer["session"], peer["address"]

    def write(self, num_bytes: int, repeats: int) -> list[float]:
        seconds = []
        for _ in range(repeats):
            started = time.monotonic()
            code = self._engine.transfer_sync_write(self._peer, self.address, self._peer_address, num_bytes)
            seconds.append(time.monotonic() - started)
            assert code == 0, code
        return seconds

    def progress(self) -> None:
        """Its own threads do."""

    def close(self) -> None:
        self._engine.unregister_memory(self.address)
        del self._engine


LIBRARIES: dict[str, type[Library]] = {"nixl": Nixl, "mooncake": Mooncake}


def copy(source: np.ndarray[Any, np.dtype[np.uint8]], num_bytes: int, repeats: int) -> list[float]:
    """Seconds of each `memcpy`, one thread, to other memory of this process."""
    target = memory(num_bytes)
    seconds = []
    for _ in range(repeats):
        started = time.monotonic()
        ctypes.memmove(target.ctypes.data, source.ctypes.data, num_bytes)
        seconds.append(time.monotonic() - started)
    return seconds


def main() -> int:
    role, name, num_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    library = LIBRARIES[name](num_bytes)

    def say(answer: object) -> None:
        sys.stdout.write(json.dumps({"answer": answer}) + "\n")
        sys.stdout.flush()

    calls = calls_from_stdin()
    say(library.describe())
    driving = role == "target"
    """A target starts by driving the library: the first write of a pair needs it."""
    while True:
        if driving and not select.select([calls], [], [], 0)[0]:
            library.progress()
            continue
        line = calls.readline()
        if not line:
            break
        call = json.loads(line)
        match call.pop("op"):
            case "connect":
                library.connect(**call)
                say(None)
            case "write":
                say(library.write(**call))
            case "copy":
                say(copy(library.memory, **call))
            case "drive":
                driving = call["on"]
                say(None)
    library.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
