"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.bench.stats import Distribution, Summary


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column left-aligned, the rest right-aligned."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def render(line: list[str]) -> str:
        cells = [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([render(lines[0]), "  ".join("-" * w for w in widths), *map(render, lines[1:])])


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.1f}"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def summary_tables(summary: Summary) -> str:
    """Latencies, then throughput."""

    def latency(name: str, d: Distribution | None) -> list[str]:
        if d is None:
            return [name, "-", "-", "-", "-"]
        return [name, *(milliseconds(v) for v in (d.mean, d.p50, d.p99, d.max))]

    latencies = table(
        ["latency (ms)", "mean", "p50", "p99", "max"],
        [
            latency("TTFT", summary.ttft),
            latency("ITL", summary.itl),
            latency("TPOT", summary.tpot),
            latency("whole request", summary.latency),
        ],
    )
    rows = [
        ["requests", f"{summary.requests} ({summary.failed} failed)"],
        ["duration (s)", f"{summary.duration:.2f}"],
        ["requests/s", f"{summary.request_rate:.3f}"],
        ["input tok/s", rate(summary.input_rate)],
        ["output tok/s", rate(summary.output_rate)],
    ]
    if summary.steady_decode_rate is not None:
        rows.append(["decode tok/s, all streams running", rate(summary.steady_decode_rate)])
    if summary.goodput is not None and summary.goodput_share is not None:
        rows.append(["goodput (requests/s)", f"{summary.goodput:.3f} ({summary.goodput_share:.0%})"])
    return f"{latencies}\n\n{table(['throughput', ''], rows)}"
