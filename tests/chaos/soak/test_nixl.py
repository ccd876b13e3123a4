from __future__ import annotations

from pathlib import Path

from chaos.soak.conftest import check_soak
from support.soak.answers import Answers


def test_soak(model: Path, answers: Answers, tmp_path: Path) -> None:
    check_soak("nixl", model, answers, tmp_path)
