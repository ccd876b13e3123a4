"""Tests publish real records: no accessor is replaced, and nothing stands in for a bag."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from unit.common_config.sources import ROOT

from diptych.common_config.namespaces import NAMESPACES

TESTS = ROOT / "tests"
ACCESSORS = re.compile(rf"(^|\.)(get_({'|'.join(NAMESPACES)})|get_context|readback)$")
FAKES = {"SimpleNamespace", "Mock", "MagicMock", "AsyncMock", "create_autospec"}


def stand_ins(tree: ast.Module) -> list[int]:
    """Lines that patch an accessor, by whatever name, or make an object of made-up attributes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            found += [node.lineno for alias in node.names if alias.name.split(".")[-1] in FAKES | {"mock"}]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("setattr", "patch"):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            found += [node.lineno for text in texts if ACCESSORS.search(text)]
        elif isinstance(node, ast.Attribute) and node.attr in FAKES:
            found.append(node.lineno)
        elif isinstance(node, ast.FunctionDef):
            found += [node.lineno] if ACCESSORS.search(node.name) else []
    return found


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_has_a_stand_in(path: Path) -> None:
    assert stand_ins(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "from types import SimpleNamespace",
        "import types\nbag = types.SimpleNamespace(page_size=1)",
        "from unittest.mock import MagicMock",
        "from unittest import mock",
        "monkeypatch.setattr('diptych.launch.assemble.get_schedule', f)",
        "monkeypatch.setattr(assemble, 'get_schedule', f)",
        "setattr(assemble, 'readback', f)",
        "def get_schedule():\n    return Fake()",
    ],
)
def test_a_planted_stand_in_is_found(text: str) -> None:
    assert stand_ins(ast.parse(text))
