"""The serving benchmark against a scripted server."""

from __future__ import annotations

import json

import pytest

from diptych.bench import serving
from diptych.bench.baseline import BaselineJob, BaselineResult
from diptych.bench.stats import RequestRecord, summarize


def run(server, *flags):
    small = ["--num-requests", "6", "--input-len", "8", "--output-len", "5", "--warmup", "0"]
    return serving.main(["--url", server.url, "--model", "m", *small, *flags])


def test_every_request_asks_for_exactly_what_is_measured(completions_server, capsys):
    assert run(completions_server) == 0
    assert len(completions_server.bodies) == 6
    for body in completions_server.bodies:
        assert body["max_tokens"] == 5
        assert body["ignore_eos"] is True
        assert body["stream"] is True
        assert body["temperature"] == 0
        assert len(body["prompt"]) == 8
    assert len({tuple(b["prompt"]) for b in completions_server.bodies}) == 6
    assert "6 (0 failed)" in capsys.readouterr().out


def test_the_report_has_the_times_that_the_server_took(completions_server, tmp_path):
    completions_server.first, completions_server.gap = 0.1, 0.02
    out = tmp_path / "out.json"
    assert run(completions_server, "--json", str(out), "--goodput", "ttft:1000", "tpot:1") == 0
    summary = json.loads(out.read_text())["summary"]
    # Lower bounds are exact; the upper ones leave room for a busy machine.
    assert 0.1 <= summary["ttft"]["p50"] < 0.4
    assert 0.02 <= summary["tpot"]["p50"] < 0.09
    assert 0.02 <= summary["itl"]["p50"] < 0.09
    assert summary["output_tokens"] == 30
    assert summary["goodput"] == 0.0  # TTFT is met, TPOT is not


def test_tokens_that_share_an_event_are_all_counted(completions_server, tmp_path):
    completions_server.tokens_per_event = 2
    out = tmp_path / "out.json"
    assert run(completions_server, "--json", str(out)) == 0
    assert json.loads(out.read_text())["summary"]["output_tokens"] == 30


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_that_many_requests_running(completions_server, concurrency):
    completions_server.first = 0.05
    assert run(completions_server, "--concurrency", str(concurrency)) == 0
    assert completions_server.most == concurrency


def test_poisson_arrivals_do_not_wait_for_answers(completions_server):
    completions_server.first = 0.3
    assert run(completions_server, "--rate", "200") == 0
    assert completions_server.most == 6


def test_warm_up_requests_are_sent_but_not_counted(completions_server, tmp_path):
    out = tmp_path / "out.json"
    assert run(completions_server, "--warmup", "2", "--json", str(out)) == 0
    assert len(completions_server.bodies) == 8
    assert json.loads(out.read_text())["summary"]["requests"] == 6
    assert len({tuple(b["prompt"]) for b in completions_server.bodies}) == 8


def test_failed_and_cut_answers_are_counted_and_shown(completions_server, tmp_path, capsys):
    completions_server.fail_on, completions_server.cut_on = frozenset({1}), frozenset({3})
    out = tmp_path / "out.json"
    assert run(completions_server, "--json", str(out)) == 1
    summary = json.loads(out.read_text())["summary"]
    assert summary["failed"] == 2
    assert "[DONE]" in capsys.readouterr().err
    assert any("500" in e for e in summary["errors"])


def test_a_server_that_is_not_there_is_a_failure_not_a_traceback(capsys):
    assert serving.main(["--url", "http://127.0.0.1:1", "--model", "m", "--num-requests", "1"]) == 1
    assert "failed:" in capsys.readouterr().err


def test_the_report_does_not_hold_the_key(completions_server, tmp_path):
    out = tmp_path / "out.json"
    assert run(completions_server, "--json", str(out), "--api-key", "s3cret") == 0
    assert "s3cret" not in out.read_text()


@pytest.mark.parametrize(
    "flags",
    [
        ["--goodput", "itl:3"],
        ["--baseline", "transformers"],
        ["--num-requests", "0"],
        ["--rate", "0"],
        ["--rate", "1", "--concurrency", "1"],
    ],
)
def test_bad_flags_are_refused(flags):
    with pytest.raises(SystemExit) as raised:
        serving.main(["--url", "http://127.0.0.1:1", "--model", "m", *flags])
    assert raised.value.code == 2


def test_the_baseline_table_gives_ratios():
    records = [RequestRecord(input_tokens=100, output_tokens=3, sent=0.0, token_times=[0.1, 0.2, 0.3])]
    job = BaselineJob(model_dir="d", input_len=100, decode_input_len=100, output_len=3)
    baseline = BaselineResult(job=job, prefill_rate=500.0, decode_rate=5.0)
    lines = serving.baseline_table(summarize(records, 1.0), 100, baseline).splitlines()
    assert lines[2].split()[-3:] == ["1000.0", "500.0", "2.00x"]
    assert lines[3].split()[-3:] == ["10.0", "5.0", "2.00x"]
