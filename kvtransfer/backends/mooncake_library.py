"""Is Mooncake usable here, and the environment it must find when it is loaded.

The library reads its settings from the environment and logs to standard error. What an operator has set stays
as it is.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import math
import os
from dataclasses import dataclass
from pathlib import Path

PROTOCOLS = ("tcp", "rdma")

_PACKAGES = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
"""Builds of the same module; one of them is to be installed."""

_OLDEST = (0, 3, 13)
"""The first that is known to call a TCP write complete only once the target has acknowledged it."""

_DEBIAN = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    host: str
    """The address at which peers reach this worker."""
    protocol: str = "tcp"
    """One of `PROTOCOLS`."""
    ib_device: str = ""
    """RDMA devices, comma-separated; empty: all."""
    stall_timeout: float = 12.0
    """Seconds without any progress after which the library gives a TCP transfer up."""


def missing_packages() -> list[str]:
    """Debian packages with shared libraries that Mooncake needs and this machine lacks."""
    missing = []
    for name, package in _DEBIAN.items():
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(package)
    return missing


def why_unavailable(protocol: str) -> str | None:
    """Why Mooncake can't be used here over that protocol, as a sentence that says what to do, or None."""
    if protocol == "rdma":
        devices = Path("/sys/class/infiniband")
        if not devices.is_dir() or not any(devices.iterdir()):
            # The library would fall back to TCP without a word.
            return "--mooncake-protocol rdma: this machine has no RDMA device"
        if "MC_FORCE_TCP" in os.environ:
            return "--mooncake-protocol rdma contradicts MC_FORCE_TCP in the environment"
    if os.environ.get("MC_TCP_PROTO") == "1":
        return (
            "MC_TCP_PROTO=1 in the environment: without acknowledgements nobody knows when pages have arrived"
        )
    versions = [v for v in map(_version, _PACKAGES) if v is not None]
    if not versions:
        return (
            "the mooncake transfer backend needs the package mooncake-transfer-engine-non-cuda "
            "(mooncake-transfer-engine on a CUDA machine): pip install 'diptych[mooncake]' "
            "(or 'diptych[mooncake-cuda]')"
        )
    if any(_numbers(version) < _OLDEST for version in versions):
        oldest = ".".join(map(str, _OLDEST))
        return f"Mooncake {', '.join(versions)} is too old: this worker needs {oldest} or newer"
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        missing = missing_packages()
        if missing:
            return (
                f"the mooncake transfer backend needs shared libraries that this machine lacks: "
                f"apt-get install {' '.join(missing)} ({error})"
            )
        return f"the mooncake package can't be loaded: {error}"
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def configure(settings: MooncakeSettings) -> None:
    """Set what the library reads when it is loaded and started."""
    if settings.protocol == "tcp":
        # The library would choose RDMA by itself where it finds a device.
        os.environ["MC_FORCE_TCP"] = "1"
    defaults = {
        # Without the pool each descriptor opens a socket of its own.
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(max(1, math.ceil(settings.stall_timeout))),
        "MC_LOG_LEVEL": "ERROR",
        # The same, for what is logged before that is read.
        "GLOG_minloglevel": "2",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    print(" ".join(missing_packages()))
