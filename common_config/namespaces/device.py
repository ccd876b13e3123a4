"""What the worker computes on."""

from __future__ import annotations

from diptych.common_config.declare import OPEN, Namespace, leaf


class Device(Namespace):
    """What the worker computes on."""

    device: str = leaf(
        "auto", help="Where to run; auto takes CUDA where there is one.", choices=("auto", "cpu", "cuda")
    )
    cpu_threads: int = leaf(
        OPEN,
        help="Threads that compute on the CPU.",
        unit="threads",
        ge=1,
        le=4096,
        open_means="the cores that this process may use",
    )
