"""How a worker of each side is picked: `--policy`, `--prefill-policy`, `--decode-policy`."""

from __future__ import annotations

from collections.abc import Callable

from diptych.common_config import get_router
from diptych.router.policies.base import Policy
from diptych.router.policies.cache_aware import CacheAware, CacheAwareSettings
from diptych.router.policies.simple import LeastLoaded, PowerOfTwo, Random, RoundRobin
from diptych.router.workers import WorkerRole


def _cache_aware() -> Policy:
    settings = get_router()
    return CacheAware(
        CacheAwareSettings(
            cache_threshold=settings.cache_threshold,
            balance_abs_threshold=settings.balance_abs_threshold,
            balance_rel_threshold=settings.balance_rel_threshold,
            max_tree_size=settings.max_tree_size,
        )
    )


_ANY_SIDE: dict[str, Callable[[], Policy]] = {
    "random": Random,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
}
_POLICIES: dict[WorkerRole, dict[str, Callable[[], Policy]]] = {
    WorkerRole.PREFILL: {**_ANY_SIDE, "cache_aware": _cache_aware},
    # A decode worker computes no prompt, whatever it has seen: what is left to be aware of is the load.
    WorkerRole.DECODE: {**_ANY_SIDE, "cache_aware": LeastLoaded},
}


def configured_policy(role: WorkerRole) -> Policy:
    """A new instance of the policy that is set for this side."""
    pair = get_router().policies
    return _POLICIES[role][pair.prefill if role is WorkerRole.PREFILL else pair.decode]()


__all__ = ["CacheAware", "CacheAwareSettings", "Policy", "configured_policy"]
