"""The comparison table, from a scripted server in both roles."""

from __future__ import annotations

import asyncio

import pytest

from diptych.bench.baseline import BaselineJob, BaselineResult
from diptych.bench.compare import Comparison, comparison_table, measure_server


def test_the_table_compares_the_same_loads(completions_server):
    def measure():
        return asyncio.run(
            measure_server(
                completions_server.url,
                "m",
                input_len=20,
                output_len=16,
                repeats=2,
                ready_seconds=1.5,
                vocab_size=2000,
            )
        )

    completions_server.first, completions_server.gap = 0.05, 0.01
    colocated = measure()
    completions_server.first = 0.1
    disaggregated = measure()
    job = BaselineJob(model_dir="d", input_len=20, decode_input_len=32, output_len=16)
    baseline = BaselineResult(job=job, prefill_rate=200.0, decode_rate=25.0)
    comparison = Comparison(
        model="m",
        input_len=20,
        output_len=16,
        flags=[],
        colocated=colocated,
        disaggregated=disaggregated,
        transformers=baseline,
    )
    rows = [line.rsplit(maxsplit=4) for line in comparison_table(comparison).splitlines()[2:]]
    by_name = {name.strip(): cells for name, *cells in rows}
    transformers, co, dis, ratio = by_name["TTFT of 20 tokens, p50 (ms)"]
    assert transformers == "100.0"
    # Lower bounds are exact; the upper ones leave room for a busy machine.
    assert 50 <= float(co) < 200
    assert 100 <= float(dis) < 300
    assert float(ratio.rstrip("x")) == pytest.approx(float(dis) / float(co), abs=0.02)
    alone, streams = by_name["decode, 1 stream (tok/s)"], by_name["decode, 8 streams (tok/s)"]
    assert alone[0] == "25.0"
    assert 25 < float(alone[1]) <= 100
    assert 2 * float(alone[1]) < float(streams[1]) <= 900
    assert by_name["start to ready (s)"][1:3] == ["1.5", "1.5"]


def test_the_table_does_without_a_baseline_and_with_failures(completions_server):
    completions_server.fail_on = frozenset(range(100))
    failed = asyncio.run(measure_server(completions_server.url, "m", 4, 4, 1, 1.0, 2000))
    comparison = Comparison(
        model="m",
        input_len=4,
        output_len=4,
        flags=[],
        colocated=failed,
        disaggregated=failed,
        transformers=None,
    )
    assert "-" in comparison_table(comparison).splitlines()[2].split()
