"""The project's own source files, parsed: what the census tests look at."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import diptych.common_config

ROOT = Path(diptych.common_config.__file__).parent.parent


def folders() -> list[str]:
    """The top folders of the package, from `pyproject.toml`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return sorted({name.split(".")[1] for name in project["tool"]["setuptools"]["packages"]})


def scripts() -> dict[str, str]:
    """Installed commands: name → `module:function`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return dict(project["project"]["scripts"])


def modules(*, without: tuple[str, ...] = ()) -> dict[str, ast.Module]:
    """Module name → tree, for every file of the package."""
    found = {}
    for folder in folders():
        if folder not in without:
            for path in sorted((ROOT / folder).rglob("*.py")):
                parts = path.relative_to(ROOT).with_suffix("").parts
                name = ".".join(("diptych", *parts)).removesuffix(".__init__")
                found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


def parse(**texts: str) -> dict[str, ast.Module]:
    """Planted modules: `a="…"` becomes `diptych.a`."""
    return {f"diptych.{name}": ast.parse(text) for name, text in texts.items()}
