"""One cluster per backend for all these files: what one test does to it may not be seen by the next."""

from collections.abc import Iterator

import pytest
from support.answers import Clients
from support.cluster import Cluster
from support.processes import eventually_no_processes
from support.staged import stage_cluster

from diptych.common_config.namespaces.disagg import TRANSFER_BACKENDS


@pytest.fixture(scope="package", params=TRANSFER_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="package")
def cluster(backend: str) -> Iterator[Cluster]:
    cluster = stage_cluster(backend)
    try:
        yield cluster
        cluster.close()
    finally:
        cluster.kill()
    assert eventually_no_processes() == []


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> None:
    """Asked when the cluster has ended, not after each file."""


@pytest.fixture
def clients(cluster: Cluster) -> Iterator[Clients]:
    """In the end nothing is held: a test that fails must not fail the next."""
    with Clients() as clients:
        yield clients
    for worker in cluster.workers:
        worker.faults.release()
