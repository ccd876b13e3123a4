"""A child of `launch-local` may print anything: its pipe is read on."""

from __future__ import annotations

import pytest

from diptych.launch.child import Child

PRINTS = """
import sys
sys.stdout.write("x" * (5 << 20) + "\\n")
print("ready: http://here")
sys.stdout.write("y" * (3 << 20))
"""


async def test_a_line_of_megabytes_stops_neither_the_child_nor_us(
    tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("module")
    (folder / "prints_much.py").write_text(PRINTS)
    child = await Child.start("loud", "prints_much", [], {"PYTHONPATH": str(folder)})
    assert await child.ready_line() == "http://here"
    assert await child.end() == 0
    out = capfd.readouterr().out
    assert out.count("x") >= 5 << 20
    assert out.count("y") >= 3 << 20
    assert out.startswith("[loud] ")
