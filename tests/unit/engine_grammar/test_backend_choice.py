"""Which backend a worker has: what was asked for, or none where the library is missing, for all to see."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unit.engine.tiny_llama import LLAMA

from diptych.common_config import Role, get_exec, override_config, readback
from diptych.engine.grammar import Grammars
from diptych.engine.models.config import ModelConfig
from diptych.launch.assemble import build_grammars


def build(tmp_path: Path) -> Grammars | None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return build_grammars(ModelConfig.from_dir(tmp_path), tmp_path)


def test_a_missing_library_turns_the_backend_off_in_the_readback_and_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "xgrammar" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with override_config(role=Role.DECODE_SCHEDULER), caplog.at_level(logging.WARNING):
        assert build(tmp_path) is None
        assert get_exec().grammar.grammar_backend == "none"
        shown = readback()
        assert shown["bags"]["exec"]["grammar"]["grammar_backend"] == "none"
        assert shown["record"]["grammar_backend"] == "xgrammar", "what was asked for stays"
        assert "grammar_backend" in str(shown["overrides"])
    assert "xgrammar is not installed" in caplog.text


def test_the_backend_can_be_turned_off(tmp_path: Path) -> None:
    with override_config(role=Role.DECODE_SCHEDULER, grammar_backend="none"):
        assert build(tmp_path) is None
    with override_config(role=Role.DECODE_SCHEDULER):
        grammars = build(tmp_path)
        assert grammars is not None
        grammars.close()


def test_white_space_in_json_can_be_turned_off(tmp_path: Path) -> None:
    for off in (False, True):
        with override_config(role=Role.DECODE_SCHEDULER, disable_any_whitespace=off):
            grammars = build(tmp_path)
            assert grammars is not None
            assert grammars._link._setup.any_whitespace is not off
            grammars.close()


def test_a_scheduler_does_not_load_the_library_before_it_needs_it() -> None:
    program = "import sys, diptych.launch.scheduler; print('xgrammar' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
