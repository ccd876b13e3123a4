"""Which command was started, and which part a process plays."""

from __future__ import annotations

import enum


class Program(enum.Enum):
    """A command. Its value is the command's name."""

    PREFILL = "launch-prefill"
    DECODE = "launch-decode"
    COLOCATED = "launch-colocated"
    ROUTER = "launch-router"
    LOCAL = "launch-local"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces whose flags this program has and whose bags it publishes."""
        if self is Program.ROUTER:
            return ("router", "serving", "observability")
        workers = (
            "model",
            "schedule",
            "memory",
            "exec",
            "device",
            "parallel",
            "disagg",
            "serving",
            "spec",
            "observability",
        )
        return (*workers, "router") if self is Program.LOCAL else workers


class Role(enum.Enum):
    """One process's part. Role sets (`role_sets.py`) say which namespaces each may read."""

    PREFILL_FRONTEND = "prefill_frontend"
    PREFILL_SCHEDULER = "prefill_scheduler"
    DECODE_FRONTEND = "decode_frontend"
    DECODE_SCHEDULER = "decode_scheduler"
    COLOCATED_FRONTEND = "colocated_frontend"
    COLOCATED_SCHEDULER = "colocated_scheduler"
    ROUTER = "router"
    LOCAL = "local"
