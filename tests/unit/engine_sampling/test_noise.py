from __future__ import annotations

import numpy as np

from diptych.engine.sampling.noise import splitmix64, stream_state, uniforms


def test_splitmix64_gives_the_published_sequence() -> None:
    start = np.full(5, 1234567, dtype=np.uint64)
    assert splitmix64(start, np.arange(5, dtype=np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    zero = np.zeros(1, dtype=np.uint64)
    assert splitmix64(zero, zero).tolist() == [0xE220A8397B1DCDAF]


def test_uniforms_are_uniform_over_positions_and_over_neighbouring_seeds() -> None:
    along = uniforms([stream_state(42)] * 20_000, range(20_000))
    across = uniforms([stream_state(seed) for seed in range(20_000)], [0] * 20_000)
    for sample in (along, across):
        assert sample.min() >= 0.0
        assert sample.max() < 1.0
        counts = np.bincount((sample * 100).astype(int), minlength=100)
        chi_square = ((counts - 200) ** 2 / 200).sum()
        assert chi_square < 149  # the 99.9 % quantile at 99 degrees of freedom
        assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.03


def test_any_integer_is_a_seed_and_64_bits_of_it_count() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 2, 1 << 40]
    assert len({stream_state(seed) for seed in seeds}) == len(seeds)
    assert stream_state(-1) == stream_state(2**64 - 1)


def test_streams_of_seeds_one_gamma_apart_are_not_shifted_copies() -> None:
    one, other = stream_state(7), stream_state(7 + 0x9E3779B97F4A7C15)
    assert uniforms([one] * 8, range(1, 9)).tolist() != uniforms([other] * 8, range(8)).tolist()
