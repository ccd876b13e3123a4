import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import MODEL
from support.oracle import GreedyOracle, greedy_oracle
from support.processes import eventually_no_processes

from diptych.engine.weights.cache import default_cache_dir
from diptych.engine.weights.source import prepare_model


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model, converted; the same directory that the workers load."""
    return prepare_model(MODEL, cache_dir=default_cache_dir(), report=print)


@pytest.fixture(scope="session")
def oracle(model_dir: Path) -> GreedyOracle:
    return greedy_oracle(model_dir)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test file: no process, no `/dev/shm` entry, no socket file."""
    before = leftovers()
    yield
    assert eventually_no_processes() == []
    assert leftovers() <= before


def leftovers() -> set[str]:
    """Names that outlive a process. The workers' own sockets are abstract and go with the process."""
    temporary = {entry for entry in os.listdir("/tmp") if "diptych" in entry or "ucx" in entry.lower()}
    return {f"/dev/shm/{entry}" for entry in os.listdir("/dev/shm")} | {f"/tmp/{e}" for e in temporary}
