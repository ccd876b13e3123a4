"""Imports point one way, and the router starts light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest
from unit.common_config.sources import folders, modules, parse

EVERYTHING = frozenset(folders())

MAY_IMPORT: dict[str, frozenset[str] | set[str]] = {
    "common_config": set(),
    "httpserver": {"common_config"},
    "kernels": {"common_config"},
    "engine": {"kernels", "common_config"},
    "kvtransfer": {
        *("engine.background", "engine.faults", "engine.kv_layout", "engine.wire"),
        *("httpserver.throttle", "common_config"),
    },
    "prefill": {"engine", "kvtransfer", "kernels", "common_config"},
    "decode": {"engine", "kvtransfer", "kernels", "common_config"},
    "server": {"engine.faults", "engine.wire", "httpserver", "common_config"},
    "router": {"httpserver", "common_config"},
    "launch": EVERYTHING,
    "bench": set(),
    # Measures what reading a setting costs; all else in bench/ knows servers by their HTTP API alone.
    "bench.config_reads": {"common_config"},
    # One process of the path that pages take, without a model; and the library alone with the same settings.
    "bench.transfer_worker": {"kvtransfer", "engine.kv_layout", "engine.slab"},
    "bench.transfer_raw": {"kvtransfer.backends"},
}
"""Folder, or one module of it, → what it may import of ours: folders, or single modules. Its own folder goes
without saying."""

HEAVY = {"torch", "numpy", "transformers", "tokenizers", "zmq", "nixl", "safetensors"}
"""What the router, and the configuration it starts with, may never load."""


def imports(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also those inside functions and under TYPE_CHECKING."""
    package = module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{name}.{alias.name}"


def violations(trees: Mapping[str, ast.Module]) -> list[str]:
    """Every import that the table doesn't allow."""
    found = []
    for module, tree in trees.items():
        folder = module.split(".")[1]
        own = module.removeprefix("diptych.")
        allowed = {folder, *MAY_IMPORT.get(own, MAY_IMPORT[folder])}
        for line, name in imports(module, tree):
            target = name.removeprefix("diptych.")
            if name == target:
                if folder in ("router", "httpserver", "common_config") and name.split(".")[0] in HEAVY:
                    found.append(f"{module}:{line}: imports {name}")
            elif not any(target == entry or target.startswith(entry + ".") for entry in allowed):
                found.append(f"{module}:{line}: {folder} may not import {name}")
    return found


def test_the_table_names_every_folder() -> None:
    assert {entry.partition(".")[0] for entry in MAY_IMPORT} == set(folders())


def test_imports_point_up_the_table_only() -> None:
    assert violations(modules()) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("router.x", "from diptych.engine.wire import Generate"),
        ("router.x", "import diptych.engine"),
        ("router.x", "import torch"),
        ("router.x", "def f():\n    from torch import nn"),
        ("server.x", "from diptych.engine.runner import ModelRunner"),
        ("server.x", "from diptych import engine"),
        ("engine.x", "from diptych.kvtransfer.backends.interface import Sender"),
        ("kernels.x", "from ..engine import kv_layout"),
        ("common_config.x", "if TYPE_CHECKING:\n    import diptych.launch.local"),
        ("prefill.x", "from diptych.decode.scheduler import DecodeScheduler"),
        ("bench.x", "from diptych.common_config import Program"),
        ("bench.transfer", "from diptych.kvtransfer.sender import PrefillSender"),
    ],
)
def test_a_planted_import_is_found(module: str, text: str) -> None:
    assert len(violations(parse(**{module: text}))) == 1


def test_the_router_starts_in_under_a_second_and_without_the_engine() -> None:
    program = (
        "import sys, diptych.launch.router\n"
        f"heavy = {sorted(HEAVY)!r} + ['diptych.engine', 'diptych.kernels', 'diptych.server']\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    times = []
    for _ in range(2):  # the first may compile modules
        before = os.times()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        after = os.times()
        # Processor time of children, user and system: what else this machine does is no fault of the router.
        times.append(sum(after[2:4]) - sum(before[2:4]))
        assert done.stdout == "[]\n"
    assert min(times) < 1.0
