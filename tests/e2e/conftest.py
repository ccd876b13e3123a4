from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import MODEL
from support.oracle import GreedyOracle, greedy_oracle
from support.processes import eventually_no_processes
from support.tiny_model import save_tiny_model

from diptych.engine.weights.cache import default_cache_dir
from diptych.engine.weights.source import prepare_model


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model, converted; the same directory that the workers load."""
    return prepare_model(MODEL, cache_dir=default_cache_dir(), report=print)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def oracle(model_dir: Path) -> GreedyOracle:
    return greedy_oracle(model_dir)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test file no process of it runs. Of files that outlive a process: `tests/conftest.py`."""
    yield
    assert eventually_no_processes() == []
