"""Who a process is, and how another process can know that it is gone for good."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import msgspec


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """One process start. `instance_id` is fresh each time; the rest lets a process of the same host see
    that this one has ended. Pids mean nothing across pid namespaces, so the namespace is part of it."""

    instance_id: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int
    """Start time since boot in clock ticks: tells this process from a later one with the same pid."""

    @classmethod
    def current(cls) -> Identity:
        """A new identity for the calling process."""
        stat = _read_stat(os.getpid())
        return cls(
            instance_id=uuid.uuid4().hex,
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            start_ticks=stat.start_ticks if stat else 0,
        )

    def is_of_this_host(self) -> bool:
        """True only on proof."""
        return bool(self.boot_id) and self.boot_id == _boot_id()

    def is_known_dead(self) -> bool:
        """True only on proof: the process ran on this host, in this pid namespace, and is no more."""
        if not self.start_ticks or not self.is_of_this_host():
            return False
        if not self.pid_namespace or self.pid_namespace != _pid_namespace():
            return False
        if not Path("/proc/self/stat").exists():
            return False
        stat = _read_stat(self.pid)
        if stat is None or stat.start_ticks != self.start_ticks:
            return True
        return stat.state in "ZX" and stat.num_threads <= 1


class _Stat(msgspec.Struct, frozen=True):
    state: str
    num_threads: int
    start_ticks: int


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may hold spaces and parentheses; the fixed fields follow the last one.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(state=fields[0], num_threads=int(fields[17]), start_ticks=int(fields[19]))


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _pid_namespace() -> str:
    path = Path("/proc/self/ns/pid")
    return str(path.readlink()) if path.is_symlink() else ""
