"""The randomness of sampling: one uniform number per token, a function of (seed, output position) alone.

The generator is SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA
2014, in the 64-bit form published by Vigna). Its n-th output depends on start state and n only, so it serves
as a counter-based hash: no generator state travels between workers or survives a retraction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def splitmix64(state: npt.NDArray[np.uint64], index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Output number `index` (from 0) of the SplitMix64 generator started at `state`, elementwise."""
    z = state + (index + np.uint64(1)) * np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def stream_state(seed: int) -> int:
    """Start state of the generator for `seed`, any integer (taken modulo 2**64).

    The seed is hashed once first: SplitMix64 started at s and at s + gamma would otherwise give the same
    numbers shifted by one position."""
    start = np.array([seed & _MASK], dtype=np.uint64)
    return int(splitmix64(start, np.array([0], dtype=np.uint64))[0])


def uniforms(states: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1), a multiple of 2**-53, for each (stream state, output position)."""
    bits = splitmix64(np.array(states, dtype=np.uint64), np.array(positions, dtype=np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
