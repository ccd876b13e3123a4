from __future__ import annotations

from pathlib import Path

import pytest

from diptych.engine.weights.source import DEFAULT_MODEL, prepare_model


@pytest.fixture(scope="session")
def default_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, converted for this test run: what is under test is the conversion."""
    return prepare_model(DEFAULT_MODEL, cache_dir=tmp_path_factory.mktemp("cache"))
