"""The router's histograms show what prometheus_client's own would."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from diptych.router.histogram import RouteHistogram

BOUNDS = (0.005, 0.25, 1, 30)


def test_the_same_exposition_as_the_librarys_histogram() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = RouteHistogram("seconds", "How long.", BOUNDS, ours)
    library = Histogram("seconds", "How long.", ["route"], buckets=BOUNDS, registry=theirs)
    for route, values in {"/a": (0.001, 0.005, 0.0051, 1.0, 1e9), "/b": (0.25,)}.items():
        for value in values:
            own.of(route).observe(value)
            library.labels(route).observe(value)
    shown = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == shown


def test_a_route_without_observations_is_not_shown() -> None:
    registry = CollectorRegistry()
    RouteHistogram("seconds", "How long.", BOUNDS, registry)
    assert b"seconds_count" not in generate_latest(registry)
