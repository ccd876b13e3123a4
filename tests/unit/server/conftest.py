from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.common_config import Program, get_model, override_config, resolve
from diptych.engine.weights.source import prepare_model
from diptych.server.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model, converted where `make serve` puts it."""
    import os

    record = resolve(Program.LOCAL, flags={}, env=os.environ)
    return prepare_model(record.model_path, cache_dir=Path(record.model_cache_dir or ""))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.fixture
def published() -> Iterator[None]:
    with override_config():
        assert get_model()
        yield
