"""The arithmetic of the serving benchmark."""

from __future__ import annotations

import random

import numpy
import pytest

from diptych.bench.stats import (
    Goodput,
    RequestRecord,
    distribution,
    parse_goodput,
    percentile,
    steady_decode_rate,
    summarize,
)


def record(sent, times, tokens=None, error=None, input_tokens=10):
    return RequestRecord(
        input_tokens=input_tokens,
        output_tokens=len(times) if tokens is None else tokens,
        sent=sent,
        token_times=times,
        finished=times[-1] if times else sent,
        error=error,
    )


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_percentiles_agree_with_numpy(count):
    source = random.Random(count)
    values = [source.expovariate(1) for _ in range(count)]
    for percent in (0, 1, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))


def test_a_percentile_of_nothing_is_an_error_and_a_distribution_none():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    assert distribution([]) is None


def test_times_of_one_request():
    r = record(100.0, [100.5, 100.6, 100.8])
    assert r.ttft == pytest.approx(0.5)
    assert r.latency == pytest.approx(0.8)
    assert r.itls == pytest.approx([0.1, 0.2])
    assert r.tpot == pytest.approx(0.15)


def test_tpot_counts_tokens_not_events():
    assert record(0.0, [1.0, 2.0], tokens=11).tpot == pytest.approx(0.1)


def test_one_token_has_no_tpot():
    assert record(0.0, [1.0]).tpot is None


@pytest.mark.parametrize(
    ("targets", "met"),
    [
        (Goodput(ttft=0.5), True),
        (Goodput(ttft=0.49), False),
        (Goodput(tpot=0.25), True),
        (Goodput(tpot=0.24), False),
        (Goodput(ttft=0.5, tpot=0.24), False),
        (Goodput(ttft=0.4, tpot=0.25), False),
        (Goodput(ttft=0.5, tpot=0.25), True),
    ],
)
def test_a_request_meets_all_targets_or_none(targets, met):
    assert targets.met_by(record(0.0, [0.5, 0.75, 1.0])) is met


def test_failed_requests_meet_nothing_and_single_tokens_have_no_tpot_to_miss():
    assert not Goodput().met_by(record(0.0, [0.1], error="boom"))
    assert Goodput(tpot=1e-9).met_by(record(0.0, [0.1]))


def test_goodput_is_requests_per_second_over_the_whole_run():
    records = [record(0.0, [0.1, 0.2]), record(0.0, [5.0, 5.1]), record(0.0, [], error="boom")]
    summary = summarize(records, duration=4.0, targets=Goodput(ttft=1.0))
    assert summary.goodput == pytest.approx(0.25)
    assert summary.goodput_share == pytest.approx(1 / 3)


def test_a_summary_leaves_failed_requests_out_of_rates_and_latencies():
    records = [record(0.0, [1.0, 2.0]), record(0.0, [3.0], tokens=7, error="cut")]
    summary = summarize(records, duration=2.0)
    assert (summary.requests, summary.failed, summary.errors) == (2, 1, ["cut"])
    assert (summary.input_rate, summary.output_rate, summary.request_rate) == (5.0, 1.0, 0.5)
    assert summary.ttft.max == 1.0
    assert summary.goodput is None


def test_a_run_in_which_all_failed_still_has_a_summary():
    summary = summarize([record(0.0, [], error="boom")], duration=1.0)
    assert (summary.ttft, summary.tpot, summary.steady_decode_rate) == (None, None, None)


def test_steady_decode_rate_looks_only_where_all_streams_run():
    # One stream at 10/s from 1.0 to 3.0, one at 20/s from 2.0 to 4.0: together 30/s from 2.0 to 3.0.
    slow = record(0.0, [1.0 + i / 10 for i in range(21)])
    fast = record(0.0, [2.0 + i / 20 for i in range(41)])
    assert steady_decode_rate([slow, fast]) == pytest.approx(30.0, rel=0.05)


def test_steady_decode_rate_spreads_tokens_over_events():
    assert steady_decode_rate([record(0.0, [0.0, 1.0, 2.0], tokens=9)]) == pytest.approx(4.0)


def test_there_is_no_steady_rate_without_a_common_window_or_with_a_failure():
    first, second = record(0.0, [0.0, 1.0]), record(0.0, [2.0, 3.0])
    assert steady_decode_rate([first, second]) is None
    assert steady_decode_rate([first, record(0.0, [], error="boom")]) is None


def test_goodput_targets_are_read_in_milliseconds():
    assert parse_goodput(["ttft:200", "tpot:37.5"]) == Goodput(ttft=0.2, tpot=0.0375)
    assert parse_goodput(["tpot:50"]) == Goodput(tpot=0.05)


@pytest.mark.parametrize(
    "words", [["ttft"], ["itl:5"], ["ttft:x"], ["ttft:0"], ["ttft:-1"], ["ttft:nan"], ["ttft:1", "ttft:2"]]
)
def test_bad_targets_are_refused(words):
    with pytest.raises(ValueError, match=words[0].split(":")[0]):
        parse_goodput(words)
