"""One declaration is all that a setting needs, and what is wrong with one is said when it is imported."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import diptych.common_config
from diptych.common_config.declare import Derived, Namespace, leaf
from diptych.common_config.docs import page
from diptych.common_config.namespaces import Memory

PACKAGE = Path(diptych.common_config.__file__).parent
DOCS = PACKAGE.parent / "docs" / "configuration.md"

NEW_SETTING = """
    speculative_depth: int = leaf(3, help="Draft tokens a step.", unit="tokens", ge=1, le=16)
"""

USE = """
import sys
from diptych.common_config import *
from diptych.common_config.docs import page
assert "`--speculative-depth`" in page()
record = parse_command_line(Program.DECODE, ["--model-path", "m", "--speculative-depth", "5"])
publish(record, role=Role.DECODE_SCHEDULER)
assert get_spec().speculative_depth == 5
assert resolve(Program.LOCAL, env={"DIPTYCH_SPECULATIVE_DEPTH": "6"}).speculative_depth == 6
assert LaunchConfig.from_bytes(record.to_bytes()).speculative_depth == 5
parse_command_line(Program.DECODE, ["--model-path", "m", "--speculative-depth", "17"])
"""


def test_a_setting_is_added_by_one_declaration(tmp_path: Path) -> None:
    copy = tmp_path / "diptych" / "common_config"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    spec = copy / "namespaces" / "spec.py"
    spec.write_text(spec.read_text().replace("import Namespace", "import Namespace, leaf") + NEW_SETTING)
    # -S leaves out the installed package's finder; the copy is found first, its dependencies behind it.
    paths = [str(tmp_path), *(entry for entry in sys.path if "site-packages" in entry)]
    program = f"import sys; sys.path[:0] = {paths!r}\n{USE}"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "launch-decode: --speculative-depth: 17 is not a whole number from 1 to 16\n",
    )


def test_the_reference_is_current() -> None:
    assert DOCS.read_text() == page() + "\n", (
        "regenerate: python -m diptych.common_config.docs > docs/configuration.md"
    )


def test_a_flag_that_the_reference_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = dataclasses.replace(Memory.leaves["max_total_tokens"], name="undocumented")
    monkeypatch.setitem(Memory.leaves, "undocumented", extra)
    assert "`--undocumented`" in page()
    assert DOCS.read_text() != page() + "\n"


def test_mistakes_in_a_declaration_fail_at_import() -> None:
    with pytest.raises(TypeError, match="leaf a: its default is None"):

        class NoneWithoutSaying(Namespace):
            a: int = leaf(None, help="A.")

    with pytest.raises(TypeError, match="leaf a: a leaf is an int"):

        class OfAnyType(Namespace):
            a: dict[str, int] = leaf({}, help="A.")

    with pytest.raises(TypeError, match="full stop"):

        class Terse(Namespace):
            a: int = leaf(1, help="A")

    with pytest.raises(TypeError, match="what its elements are"):

        class Untold(Namespace):
            a: tuple[str, ...] = leaf((), help="A.")


def test_derived_leaves_may_build_on_each_other() -> None:
    class Chain(Namespace):
        b: int = Derived(lambda view: view.a + 1, help="B.")

    assert list(Chain.derived) == ["b"]
    assert Chain.bag_type.__slots__ == ("b",)
