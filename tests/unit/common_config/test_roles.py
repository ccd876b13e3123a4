"""What each role may read: off, record, enforce."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.common_config import (
    ConfigError,
    Program,
    Role,
    RoleNamespaceError,
    get_context,
    get_memory,
    get_schedule,
    get_serving,
    publish,
    readback,
    resolve,
)
from diptych.common_config.namespaces import NAMESPACES
from diptych.common_config.role_sets import FILE_VARIABLE, MODE_VARIABLE, ROLE_SETS, collect


def publish_as(role: Role) -> None:
    publish(resolve(Program.LOCAL, env={}), role=role)


def test_every_role_has_an_entry_of_known_namespaces() -> None:
    assert set(ROLE_SETS) == set(Role)
    for namespaces in ROLE_SETS.values():
        assert namespaces is None or namespaces <= set(NAMESPACES)


def test_record_writes_each_pair_once_and_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pairs"
    monkeypatch.setenv(MODE_VARIABLE, "record")
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    publish_as(Role.DECODE_SCHEDULER)
    assert collect(path) == {Role.DECODE_SCHEDULER: frozenset()}
    for _ in range(3):
        assert get_schedule().page_size == 16
    assert collect(path) == {Role.DECODE_SCHEDULER: frozenset({"schedule"})}
    assert len(path.read_text().splitlines()) == 2
    publish_as(Role.ROUTER)
    get_serving()
    assert collect(path) == {
        Role.DECODE_SCHEDULER: frozenset({"schedule"}),
        Role.ROUTER: frozenset({"serving"}),
    }


def test_a_recorded_pair_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "pairs"
    program = (
        "import os, signal; from diptych.common_config import *\n"
        "publish(resolve(Program.LOCAL), role=Role.ROUTER); get_memory()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = {**os.environ, MODE_VARIABLE: "record", FILE_VARIABLE: str(path)}
    assert subprocess.run([sys.executable, "-c", program], env=env).returncode == -9
    assert collect(path) == {Role.ROUTER: frozenset({"memory"})}
    listing = [sys.executable, "-m", "diptych.common_config.role_sets", str(path)]
    assert subprocess.check_output(listing, text=True) == "router: memory\n"


def test_enforce_fails_closed_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "enforce")
    monkeypatch.setitem(ROLE_SETS, Role.LOCAL, frozenset({"schedule"}))
    publish_as(Role.LOCAL)
    assert get_schedule().page_size == 16
    for _ in range(2):
        with pytest.raises(RoleNamespaceError) as caught:
            get_memory()
    message = str(caught.value)
    assert message.startswith(f"role local read namespace memory at {__file__}:")
    assert "outside its set (schedule)" in message
    assert "DIPTYCH_ROLE_NAMESPACES=record" in message
    assert "common_config/role_sets.py" in message
    with pytest.raises(ConfigError, match="role local may not touch max_total_tokens of memory"):
        get_context().override("gate", max_total_tokens=64)
    assert set(readback()["bags"]) == {"schedule"}


def test_a_role_without_a_recorded_run_may_read_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "enforce")
    monkeypatch.setitem(ROLE_SETS, Role.LOCAL, None)
    publish_as(Role.LOCAL)
    assert get_memory().max_total_tokens is None


def test_off_does_not_look_at_the_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROLE_SETS, Role.ROUTER, frozenset())
    publish_as(Role.ROUTER)
    assert get_memory().max_total_tokens is None


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("enforced", "did you mean enforce"),
        ("", "not one of off, record, enforce"),
        ("record", FILE_VARIABLE),
    ],
)
def test_a_mistake_in_the_mode_fails_at_publish(
    mode: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE_VARIABLE, mode)
    with pytest.raises(ConfigError, match=message):
        publish_as(Role.LOCAL)
