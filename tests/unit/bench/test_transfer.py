"""The transfer benchmark: real processes over one tiny size, and its arithmetic."""

from __future__ import annotations

import itertools

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from diptych.bench.transfer import main
from diptych.bench.transfer_exposed import Exposure, exposure_table, handover_seconds
from diptych.bench.transfer_path import PAGE_BYTES, Figures, count_runs, measure, pages_of, path_table, shapes
from diptych.bench.transfer_worker import LAYOUT
from diptych.kvtransfer.backends.interface import coalesce
from diptych.kvtransfer.stats import TransferStats


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_pages_move_in_no_more_descriptors_than_runs_and_everything_is_timed(backend: str) -> None:
    one, contiguous, scattered = measure(backend, sizes=(1, 4), rounds=1)
    assert [(f.pages, f.run) for f in (one, contiguous, scattered)] == [(1, 1), (4, 4), (4, 1)]
    assert [f.descriptors for f in (one, contiguous)] == [1, 1]
    assert 1 < scattered.descriptors <= scattered.runs <= 4
    for figures in (one, contiguous, scattered):
        assert 0 < figures.write < figures.send_to_received < figures.reserve_to_received < 1
        assert 0 < figures.memcpy < 1
        assert 0 < figures.raw < 1


def test_the_page_is_the_default_models() -> None:
    assert LAYOUT.page_bytes == PAGE_BYTES


def test_runs_are_counted_as_the_backends_join_pages() -> None:
    for src, dst in itertools.product(itertools.permutations(range(4)), repeat=2):
        assert count_runs(src, dst) == len(coalesce(src, dst))


def test_a_transfer_consists_of_distinct_pages_in_runs_of_the_wanted_length() -> None:
    for pages, run in shapes((1, 8, 64)):
        src, dst = pages_of(pages, run, 512)
        assert len(set(src)) == len(set(dst)) == pages
        for start in range(0, pages, run):
            assert count_runs(src[start : start + run], dst[start : start + run]) == 1
        assert pages // run - 2 <= count_runs(src, dst) <= pages // run


def test_rates_and_ratios_are_of_the_same_bytes() -> None:
    figures = Figures(
        backend="nixl",
        pages=8,
        run=8,
        runs=1,
        descriptors=1,
        transfers=5,
        reserve_to_received=8 * PAGE_BYTES / 1e9,
        send_to_received=4 * PAGE_BYTES / 1e9,
        write=2 * PAGE_BYTES / 1e9,
        raw=1 * PAGE_BYTES / 1e9,
        memcpy=0.5 * PAGE_BYTES / 1e9,
    )
    rates, ratios = (text.splitlines()[-1].split() for text in path_table([figures]).split("\n\n"))
    assert rates[-5:] == ["1.00", "2.00", "4.00", "8.00", "16.00"]
    assert ratios[-4:] == ["0.12x", "0.25x", "0.50x", "0.12x"]


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
