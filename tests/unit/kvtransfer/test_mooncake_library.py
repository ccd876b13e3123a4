"""What a machine without Mooncake, or with a contradictory environment, is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.kvtransfer.backends import mooncake_library
from diptych.kvtransfer.backends.mooncake_library import MooncakeSettings, configure, why_unavailable


def test_this_machine_has_it() -> None:
    assert why_unavailable("tcp") is None
    assert mooncake_library.missing_packages() == []


def stand_in(folder: Path, version: str = "0.3.13.post1") -> dict[str, str]:
    """An environment in which importing Mooncake fails as it does without its shared libraries."""
    (folder / "mooncake").mkdir()
    (folder / "mooncake/__init__.py").write_text("")
    message = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    (folder / "mooncake/engine.py").write_text(f"raise ImportError({message!r})\n")
    metadata = folder / f"mooncake_transfer_engine_non_cuda-{version}.dist-info"
    metadata.mkdir()
    name = "Name: mooncake-transfer-engine-non-cuda"
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\n{name}\nVersion: {version}\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


def said(environment: dict[str, str], *setup: str) -> str:
    module = "from diptych.kvtransfer.backends import mooncake_library as library"
    program = "; ".join((module, *setup, "print(library.why_unavailable('tcp'))"))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_what_to_install_is_named(tmp_path: Path) -> None:
    environment = stand_in(tmp_path)
    assert "can't be loaded: libibverbs.so.1" in said(environment)
    missing = "library._DEBIAN = {'libnowhere.so.1': 'libnowhere1', 'libc.so.6': 'libc6'}"
    assert "apt-get install libnowhere1 (" in said(environment, missing)


def test_a_version_that_may_not_acknowledge_writes_is_refused(tmp_path: Path) -> None:
    assert "Mooncake 0.3.9 is too old" in said(stand_in(tmp_path, "0.3.9"))


def test_a_worker_without_its_shared_libraries_does_not_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "diptych.launch.decode", "--model-path", "smollm2-135m-instruct"),
            *("--port", "0", "--disaggregation-transfer-backend", "mooncake"),
        ],
        env=stand_in(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the mooncake package can't be loaded: libibverbs.so.1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("protocol", "environment", "reason"),
    [
        ("rdma", {}, "this machine has no RDMA device"),
        ("tcp", {"MC_TCP_PROTO": "1"}, "MC_TCP_PROTO=1"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_loaded(
    protocol: str, environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if protocol == "rdma" and Path("/sys/class/infiniband").is_dir():
        pytest.skip("this machine has an RDMA device")
    monkeypatch.setattr(os, "environ", environment)
    assert reason in str(why_unavailable(protocol))


def test_what_an_operator_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"MC_LOG_LEVEL": "INFO", "MC_TCP_PROGRESS_TIMEOUT_SEC": "77"}
    monkeypatch.setattr(os, "environ", environment)
    configure(MooncakeSettings(host="127.0.0.1", stall_timeout=2.5))
    assert environment["MC_LOG_LEVEL"] == "INFO"
    assert environment["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "77"
    assert environment["MC_TCP_ENABLE_CONNECTION_POOL"] == "1"
