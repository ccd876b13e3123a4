"""Prompts and arrivals."""

from __future__ import annotations

import itertools

import pytest

from diptych.bench.workload import TOKEN_LOW, make_prompts, poisson_arrivals


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others():
    assert make_prompts(3, 50, 32000, 7) == make_prompts(3, 50, 32000, 7)
    assert make_prompts(3, 50, 32000, 7) != make_prompts(3, 50, 32000, 8)


def test_prompts_have_their_length_and_valid_ids_and_no_common_start():
    prompts = make_prompts(20, 64, 5000, 0)
    assert [len(p) for p in prompts] == [64] * 20
    assert all(TOKEN_LOW <= t < 5000 for p in prompts for t in p)
    assert len({tuple(p[:2]) for p in prompts}) == 20


def test_a_vocabulary_without_ordinary_tokens_is_refused():
    with pytest.raises(ValueError, match="1000"):
        make_prompts(1, 1, 1000, 0)


def test_arrivals_are_a_seeded_poisson_process():
    times = poisson_arrivals(20_000, 5.0, 1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert times[0] == 0.0
    assert mean == pytest.approx(0.2, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)  # exponential gaps: deviation equals mean
    assert times == poisson_arrivals(20_000, 5.0, 1)
