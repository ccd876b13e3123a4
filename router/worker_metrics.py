"""The workers' metrics in one exposition: each sample with the labels `worker` and `role`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from diptych.router.registry import WorkerRegistry
from diptych.router.worker_facts import WorkerClient
from diptych.router.workers import Worker

logger = logging.getLogger(__name__)

SCRAPE_SECONDS = 2.0
"""What one worker gets: a scrape of the router lasts little longer, whatever its workers do."""
AT_ONCE = 16
"""Workers that are asked at the same time."""

EXPOSITION = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


async def scrape(registry: WorkerRegistry, session: aiohttp.ClientSession) -> bytes:
    """Prometheus text of all healthy workers; one that doesn't answer in time is left out."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(worker: Worker) -> tuple[Worker, str] | None:
        try:
            async with asyncio.timeout(SCRAPE_SECONDS), turns:
                return worker, await WorkerClient(session, worker.url, SCRAPE_SECONDS).metrics()
        except (aiohttp.ClientError, OSError):  # a time-out is an OSError
            return None

    answers = await asyncio.gather(*(one(w) for w in registry.workers if w.healthy))
    texts = [answer for answer in answers if answer is not None]
    # Parsing is slow enough to be felt by streams: not in the loop's thread.
    return await asyncio.to_thread(merge, texts)


def merge(texts: list[tuple[Worker, str]]) -> bytes:
    """One family of each name, with every worker's samples. A worker whose text is no exposition is left
    out, as is a family that is of another type than an earlier worker's."""
    families: dict[str, Metric] = {}
    for worker, text in texts:
        try:
            parsed = list(text_string_to_metric_families(text))
        except ValueError as error:
            logger.warning("%s: its metrics can't be read: %s", worker, error)
            continue
        for family in parsed:
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            if known.type == family.type:
                _add(known, family, worker)
    own = CollectorRegistry(auto_describe=False)
    own.register(_Families(families))
    return bytes(generate_latest(own))


def _add(known: Metric, family: Metric, worker: Worker) -> None:
    whose = {"worker": worker.url, "role": worker.role.value}
    for sample in family.samples:
        # As a Prometheus server does it where the one who scrapes has the say.
        own = {f"exported_{name}" if name in whose else name: value for name, value in sample.labels.items()}
        known.add_sample(sample.name, whose | own, sample.value)


class _Families(Collector):
    def __init__(self, families: dict[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())
