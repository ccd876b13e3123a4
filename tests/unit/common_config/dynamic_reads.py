"""Finds every read or write of an attribute whose name isn't plain in the code, and every object that answers
to any name. The names of the means are what is looked for, called or not, so no alias hides one."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

MEANS = {
    *("getattr", "hasattr", "setattr", "delattr", "vars"),
    *("attrgetter", "methodcaller", "getmembers", "getattr_static"),
    *("__dict__", "__getattribute__", "__setattr__", "__delattr__", "__getattr__"),
}
BUILTINS = {"eval", "exec", "globals", "locals"}
"""Means only where they aren't an object's own: a model has an `eval` too, and a template its `globals`."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def dynamic_reads(modules: Mapping[str, ast.Module]) -> dict[tuple[str, str], list[int]]:
    """(`module:Class.function`, the means) → lines."""
    found: dict[tuple[str, str], list[int]] = {}
    for module, tree in modules.items():
        for where, means, line in _inside(tree, ""):
            found.setdefault((f"{module}:{where}", means), []).append(line)
    return found


def _inside(node: ast.AST, where: str) -> Iterator[tuple[str, str, int]]:
    for child in ast.iter_child_nodes(node):
        inner = where
        if isinstance(child, Function | ast.ClassDef):
            inner = f"{where}.{child.name}".lstrip(".")
        for means in _means(child):
            yield inner, means, child.lineno  # type: ignore[attr-defined]
        yield from _inside(child, inner)


def _means(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id} & (MEANS | BUILTINS) if isinstance(node.ctx, ast.Load) else set()
    if isinstance(node, ast.Attribute):
        whose = MEANS | BUILTINS if ast.unparse(node.value) == "builtins" else MEANS
        return {node.attr} & whose
    if isinstance(node, Function):  # an object of ours that answers to any name
        return {node.name} & MEANS
    if isinstance(node, ast.ImportFrom):
        return {alias.name for alias in node.names} & MEANS
    return set()
