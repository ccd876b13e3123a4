"""A minute of the soak over each backend; `make soak` runs it for longer, and with other seeds.

A file for each, so that they can run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.soak.answers import Answers
from support.soak.run import Soak
from support.tiny_model import save_tiny_model

SEED = 20
SECONDS = 40.0
"""Start and end come on top."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def answers(model: Path) -> Answers:
    return Answers(SEED, model)


def check_soak(backend: str, model: Path, answers: Answers, tmp_path: Path) -> None:
    report = Soak(backend, SEED, model, answers, tmp_path).run(SECONDS)
    print(report.text())
    assert report.violations == [], report.text()
    assert report.cycles >= 3
    assert report.outcomes["finished"] > 30
