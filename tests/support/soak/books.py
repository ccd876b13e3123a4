"""The books of workers at rest: what came in must have gone out, and nothing may pile up."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from support.soak.workers import Place

MORE_DESCRIPTORS = {"frontend": 200, "scheduler": 24}
MORE_THREADS, MORE_MEGABYTES = 8, 160.0
"""What a process may hold more than at its first rest, however long it lives. A frontend has connections that
the router keeps for the next request, one for each that ran at once."""
DESCRIPTORS_PER_PEER, MEGABYTES_PER_PEER = 4, 4.0
"""And for each worker of the other side that has started since: libraries remember the dead. (Mooncake 0.3.13
keeps the sockets by which it wrote to a peer, at most four, when that peer has ended.)"""


def events_of(metrics: dict[str, float]) -> Counter[str]:
    """Faults that have fired, by where and action, and retractions."""
    fired: Counter[str] = Counter(retractions=int(metrics.get("diptych_retractions_total", 0)))
    for sample, value in metrics.items():
        if sample.startswith("diptych_transfer_faults_injected_total{"):
            labels = dict(re.findall(r'(\w+)="(\w+)"', sample))
            fired[f"{labels['where']} {labels['action']}"] = int(value)
    return fired


def check_books(place: Place) -> list[str]:
    """What doesn't add up at this worker, which must be idle."""
    metrics = place.worker.client.metrics()

    def total(name: str, **labels: str) -> float:
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            value
            for sample, value in metrics.items()
            if sample.partition("{")[0] == name and all(label in sample for label in wanted)
        )

    def books(name: str) -> dict[str, Any]:
        return {sample: value for sample, value in metrics.items() if sample.startswith(name)}

    problems = []
    if total("diptych_pool_accounting_errors_total"):
        problems.append("page counts did not add up while idle")
    for name in ("diptych_transfer_rooms", "diptych_transfer_quarantined_pages"):
        if total(name):
            problems.append(f"not back to 0: {books(name)}")
    for name in ("diptych_frontend_running_samples", "diptych_running_requests", "diptych_waiting_requests"):
        if total(name):
            problems.append(f"not back to 0: {books(name)}")
    finished = "diptych_finished_requests_total"
    ended = total(finished) - total(finished, reason="refused")
    rooms = total("diptych_transfer_rooms_done_total") + total("diptych_transfer_failures_total")
    if ended != rooms:
        problems.append(f"{ended:.0f} requests ended in the scheduler, but {rooms:.0f} rooms")
    samples = total("diptych_frontend_finished_samples_total")
    if samples != total(finished):
        problems.append(
            f"{samples:.0f} samples ended in the frontend, {total(finished):.0f} in the scheduler"
        )
    return [f"{place.side}: {problem}" for problem in problems]


def growth_of(place: Place) -> list[tuple[str, str | None]]:
    """A line for each process of the worker, and what is wrong with what it holds."""
    lines: list[tuple[str, str | None]] = []
    for pid, (first, now) in place.footprints().items():
        what = "frontend" if pid == place.launched.pid else "scheduler"
        descriptors, threads = now.descriptors - first.descriptors, now.threads - first.threads
        megabytes = now.megabytes - first.megabytes
        line = (
            f"{place.side} {what}, {place.peer_starts} peers later: {descriptors:+d} descriptors, "
            f"{threads:+d} threads, {megabytes:+.0f} MB (of {now.megabytes:.0f})"
        )
        bad = (
            descriptors > MORE_DESCRIPTORS[what] + DESCRIPTORS_PER_PEER * place.peer_starts
            or threads > MORE_THREADS
            or megabytes > MORE_MEGABYTES + MEGABYTES_PER_PEER * place.peer_starts
        )
        lines.append((line, f"grows: {line}" if bad else None))
    return lines
