"""How one worker is spread over ranks. As configured: what groups exist in a process is its own affair."""

from __future__ import annotations

from diptych.common_config.declare import Derived, Namespace, leaf


def world_size(view: Parallel) -> int:
    return view.tp_size * view.pp_size * view.dp_size


class Parallel(Namespace):
    """How one worker is spread over ranks."""

    tp_size: int = leaf(1, help="Tensor-parallel width.", unit="ranks", ge=1, le=1024)
    pp_size: int = leaf(1, help="Pipeline-parallel depth.", unit="ranks", ge=1, le=1024)
    dp_size: int = leaf(1, help="Data-parallel replicas in one worker.", unit="ranks", ge=1, le=1024)
    world_size: int = Derived(world_size, help="Scheduler processes of one worker: TP × PP × DP.")
