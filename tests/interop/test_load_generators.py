"""`guidellm` and `aiperf`: a short profile each, without errors, with goodput against two targets."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from support.cluster import MODEL

from .conftest import ClientEnvironment, Local

REQUESTS = 6
TTFT_MS, TPOT_MS = 20_000, 5_000
"""Met on any machine: that they are compared with is the point."""


def test_guidellm_profiles_the_server(
    clients: ClientEnvironment, local: Local, model_dir: Path, tmp_path: Path
) -> None:
    metrics = {"kind": "generative", "slo": {"ttft_ms": TTFT_MS, "tpot_ms": TPOT_MS}}
    clients.run(
        "guidellm",
        *("run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={local.url}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={model_dir}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8"),
        *("--metrics", json.dumps(metrics)),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
        cwd=tmp_path,
        HF_HUB_OFFLINE="1",
        PYTHONPATH=str(clients.torch),
        GUIDELLM__MAX_WORKER_PROCESSES="1",
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    measured = benchmark["metrics"]
    totals = measured["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    assert measured["output_token_count"]["successful"]["mean"] == 8
    assert measured["slo_attainment"] == 1
    assert measured["request_goodput"]["successful"]["mean"] > 0


def test_aiperf_profiles_the_server(
    clients: ClientEnvironment, local: Local, model_dir: Path, tmp_path: Path
) -> None:
    # It leaves files in the folder for temporary ones, whose name must be short: sockets lie there too.
    with TemporaryDirectory() as folder:
        clients.run(
            "aiperf",
            *("profile", "--url", local.url, "--model", MODEL, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", model_dir, "--use-server-token-count"),
            *("--concurrency", "2", "--request-count", str(REQUESTS), "--isl", "64", "--osl", "8"),
            *("--extra-inputs", "ignore_eos:true"),
            *("--goodput", f"time_to_first_token:{TTFT_MS} inter_token_latency:{TPOT_MS}"),
            *("--max-workers", "1", "--record-processor-service-count", "1"),
            *("--ui", "none", "--no-gpu-telemetry", "--artifact-dir", tmp_path),
            cwd=tmp_path,
            TMPDIR=folder,
        )
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report.get("error_summary", []) == []
    assert report["output_sequence_length"]["avg"] == 8
    assert report["goodput"]["avg"] > 0
    assert report["goodput"]["avg"] == report["request_throughput"]["avg"]
    assert report["inter_token_latency"]["avg"] > 0
    scraped = json.loads((tmp_path / "server_metrics_export.json").read_text())
    assert any(name.startswith("diptych_") for name in scraped["metrics"]), "it reads our /metrics"
