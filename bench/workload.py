"""What is sent and when, the same for the same seed."""

from __future__ import annotations

import random

TOKEN_LOW = 1000
"""Ids below are often special or byte tokens."""


def make_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` random token ids from [TOKEN_LOW, vocab_size). Two prompts share no
    prefix but by chance, so a prefix cache gains nothing."""
    if vocab_size <= TOKEN_LOW:
        raise ValueError(f"vocab size {vocab_size} must be above {TOKEN_LOW}")
    source = random.Random(f"prompts {seed}")
    return [[source.randrange(TOKEN_LOW, vocab_size) for _ in range(length)] for _ in range(count)]


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent: a Poisson process of `rate` per second. The
    first is sent at 0."""
    source = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += source.expovariate(rate)
    return times
