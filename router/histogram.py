"""Histograms for what happens with every piece of every stream: to observe is two steps, not twenty."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Series:
    """The observations of one route. For the event loop's thread alone: there is no lock."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def sum(self) -> float:
        return self._sum

    @property
    def cumulative(self) -> list[int]:
        """How many were at most each bound, and how many there are in all."""
        return list(accumulate(self._counts))


class RouteHistogram:
    """A Prometheus histogram with the label `route`. `bounds`: upper ends of the buckets, ascending."""

    def __init__(
        self, name: str, documentation: str, bounds: tuple[float, ...], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        self._series: dict[str, Series] = {}
        registry.register(self)

    def of(self, route: str) -> Series:
        """Where this route's observations go."""
        if (known := self._series.get(route)) is None:
            known = self._series[route] = Series(self._bounds)
        return known

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=["route"])
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for route, series in self._series.items():
            buckets = list(zip(names, map(float, series.cumulative), strict=True))
            family.add_metric([route], buckets, sum_value=series.sum)
        yield family
