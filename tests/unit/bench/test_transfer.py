"""The transfer benchmark: real processes over one tiny size, and its arithmetic."""

from __future__ import annotations

import itertools

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from diptych.bench.transfer import main
from diptych.bench.transfer_exposed import Exposure, exposure_table, handover_seconds
from diptych.bench.transfer_path import PAGE_BYTES, Figures, count_runs, measure, pages_of, path_table
from diptych.bench.transfer_worker import LAYOUT
from diptych.kvtransfer.backends.interface import coalesce
from diptych.kvtransfer.stats import TransferStats


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_pages_move_in_no_more_descriptors_than_runs_and_everything_is_timed(backend: str) -> None:
    contiguous, scattered = measure(backend, sizes=(4,), rounds=1)
    assert (contiguous.runs, contiguous.descriptors) == (1, 1)
    assert 1 < scattered.runs <= 4
    assert 1 <= scattered.descriptors <= scattered.runs
    for figures in (contiguous, scattered):
        assert 0 < figures.write < figures.send_to_received < figures.reserve_to_received < 1
        assert 0 < figures.in_flow < 1
        assert 0 < figures.memcpy < 1
        assert 0 < figures.raw < 1


def test_the_page_is_the_default_models() -> None:
    assert LAYOUT.page_bytes == PAGE_BYTES


def test_runs_are_counted_as_the_backends_join_pages() -> None:
    for src, dst in itertools.product(itertools.permutations(range(4)), repeat=2):
        assert count_runs(src, dst) == len(coalesce(src, dst))


def test_scattered_pages_are_distinct_and_contiguous_ones_adjacent() -> None:
    src, dst = pages_of("scattered", 64, 512, seed=1)
    assert len(set(src)) == len(set(dst)) == 64
    assert count_runs(src, dst) > 32
    assert pages_of("contiguous", 3, 8, seed=1) == ([0, 1, 2], [5, 6, 7])


def test_rates_and_ratios_are_of_the_same_bytes() -> None:
    figures = Figures(
        backend="nixl",
        pages=8,
        layout="contiguous",
        runs=1,
        descriptors=1,
        transfers=5,
        reserve_to_received=8 * PAGE_BYTES / 1e9,
        send_to_received=4 * PAGE_BYTES / 1e9,
        in_flow=2 * PAGE_BYTES / 1e9,
        write=2 * PAGE_BYTES / 1e9,
        raw=1 * PAGE_BYTES / 1e9,
        memcpy=0.5 * PAGE_BYTES / 1e9,
    )
    rates, ratios = (text.splitlines()[-1].split() for text in path_table([figures]).split("\n\n"))
    assert rates[-6:] == ["1.00", "2.00", "4.00", "4.00", "8.00", "16.00"]
    assert ratios[-5:] == ["0.12x", "0.25x", "0.50x", "0.50x", "0.25x"]


def test_exposed_time_is_what_the_worker_counts_for_handing_over() -> None:
    registry = CollectorRegistry()
    stats = TransferStats(registry, backend="nixl")
    stats.handover_seconds.observe(0.25)
    stats.handover_seconds.observe(0.5)
    assert handover_seconds(generate_latest(registry).decode()) == 0.75


def test_the_share_is_of_the_disaggregated_ttft() -> None:
    exposure = Exposure(
        backend="nixl",
        prompt_tokens=128,
        chunk=512,
        overlap=True,
        ttft=0.2,
        colocated_ttft=0.18,
        exposed=0.01,
    )
    assert exposure.share == pytest.approx(0.05)
    assert exposure_table([exposure]).splitlines()[-1].split()[-3:] == ["10.0", "5.00%", "20.0"]


def test_a_number_below_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rounds", "0"])
    assert "at least 1" in capsys.readouterr().err
