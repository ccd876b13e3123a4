"""Finds what reaches past the accessors, outside `common_config`: into the published context, into the
declarations, or to a setting's variable. None of them knows of overrides, or of who may read what."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import diptych.common_config as common_config
from diptych.common_config.resolution import ENV_PREFIX

CONTEXT = {"bags", "_bags", "effective", "_record", "_published", "_permanent", "_scoped", "_inputs"}
"""Attributes of a `Context` that hold values. None is an attribute of anything else in the project."""
DECLARATIONS = {"LEAVES", "DERIVED", "PATHS", "NAMESPACES", "namespaces"}
BY_NAME = "effective_value"


def internals(modules: Mapping[str, ast.Module]) -> list[tuple[str, str]]:
    """(module, `line: what is wrong`), in order."""
    return [
        (module, f"{line}: {message}")
        for module, tree in modules.items()
        for line, message in sorted(_wrong(tree))
    ]


def _wrong(tree: ast.Module) -> Iterator[tuple[int, str]]:
    texts = _docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for message in _import(node):
                yield node.lineno, message
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in CONTEXT and isinstance(node, ast.Attribute):
                yield node.lineno, f"reads {name} of a context; read the bag"
            elif name in DECLARATIONS:
                yield node.lineno, f"uses {name}, the declarations; read the bag"
            elif name == BY_NAME:
                yield node.lineno, f"uses {BY_NAME}; read the bag"
        elif isinstance(node, ast.Constant) and id(node) not in texts and _is_variable(node.value):
            yield node.lineno, f"names the variable {node.value}; read the bag"


def _import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Only what `common_config` itself offers may be imported, and only from there."""
    inside = "common_config."
    if isinstance(node, ast.Import):
        yield from (f"imports {alias.name}" for alias in node.names if inside in alias.name)
    elif inside in (node.module or ""):
        yield f"imports from {node.module}"
    elif (node.module or "").endswith("common_config"):
        yield from (
            f"imports {alias.name} of common_config"
            for alias in node.names
            if alias.name == BY_NAME or alias.name not in {*common_config.__all__, "*"}
        )


def _is_variable(value: object) -> bool:
    """The name of a variable of ours or its beginning, whatever becomes of it: a read may be anywhere."""
    return isinstance(value, str) and value.startswith(ENV_PREFIX)


def _docstrings(tree: ast.Module) -> set[int]:
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
