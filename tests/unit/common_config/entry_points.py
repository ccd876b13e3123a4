"""Finds bag reads that come before a process has published: at import, or in an entry point's first steps.

From each entry point the calls are followed in the order in which they are written, into every function of
the project that they name, methods of an object that the function makes included, until `publish` is reached.
(Accessors can't hide behind other names: the census forbids those.)
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping, Sequence

from diptych.common_config.namespaces import NAMESPACES

ACCESSORS = {f"get_{name}" for name in NAMESPACES} | {"get_context", "readback"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definitions = dict[str, Function]


def reads_at_import(modules: Mapping[str, ast.Module]) -> list[str]:
    """Accessor calls that run when a module is imported: top level, class bodies, defaults, decorators, and
    every function of the project that these call."""
    walk = _Walk(modules)
    for name in modules:
        walk.module(name)
    return walk.found


def entry_points(modules: Mapping[str, ast.Module], scripts: Mapping[str, str]) -> set[str]:
    """`module:function` of every installed command and of every call under `if __name__ == "__main__"`."""
    found = set(scripts.values())
    for name, tree in modules.items():
        for node in tree.body:
            if _is_main(node):
                found |= {f"{name}:{_callee(call)}" for call in _calls(node) if _callee(call) in _own(tree)}
    return found


def reads_before_publish(modules: Mapping[str, ast.Module], entry_point: str) -> list[str]:
    """`module:line: what` for each accessor call on the way from the entry point to `publish`."""
    return _Walk(modules).walk(entry_point)


def _callee(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Calls that run with this code, arguments before their call; not those in the bodies of functions."""
    if isinstance(node, Function):
        for outer in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            yield from _calls(outer)
    elif isinstance(node, ast.Lambda):
        for outer in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            yield from _calls(outer)
    elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
        for child in ast.iter_child_nodes(node):
            yield from _calls(child)
        if isinstance(node, ast.Call):
            yield node


def _is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__main__" in ast.dump(node.test)


def _own(tree: ast.Module) -> Definitions:
    """Functions of a module, and methods as `Class.method`."""
    found: Definitions = {}
    for node in tree.body:
        if isinstance(node, Function):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found.update({f"{node.name}.{m.name}": m for m in node.body if isinstance(m, Function)})
    return found


class _Published(Exception):
    """`publish` has been reached."""


class _Walk:
    def __init__(self, modules: Mapping[str, ast.Module]) -> None:
        self.modules = modules
        self.own = {name: _own(tree) for name, tree in modules.items()}
        self.imported = {name: self._imports(tree) for name, tree in modules.items()}
        self.found: list[str] = []
        self.walking: set[tuple[str, str]] = set()

    @staticmethod
    def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
        """Local name → (module, name there); functions' own imports too, and functions under other names."""
        found = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        own = _own(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                origin = found.get(node.value.id) or ("", node.value.id) * (node.value.id in own)
                if origin:
                    found |= {t.id: origin for t in node.targets if isinstance(t, ast.Name)}
        return found

    def walk(self, entry_point: str) -> list[str]:
        module, _, function = entry_point.partition(":")
        if function not in self.own.get(module, {}):
            return [f"{entry_point}: no such function"]
        with contextlib.suppress(_Published):  # what follows may read
            self._function(module, function)
        return self.found

    def module(self, name: str) -> None:
        """What runs when a module is imported; what runs only as a program is an entry point."""
        body = [node for node in self.modules[name].body if not _is_main(node)]
        with contextlib.suppress(_Published):
            self._statements(name, body, self._objects(name, body))

    def _function(self, module: str, name: str) -> None:
        if (module, name) in self.walking:
            return
        self.walking.add((module, name))
        function = self.own[module][name]
        objects = {"self": (module, name.partition(".")[0])} if "." in name else {}
        self._statements(module, function.body, objects | self._objects(module, [function]))

    def _objects(self, module: str, nodes: Sequence[ast.AST]) -> dict[str, tuple[str, str]]:
        """Names that hold what a call has made, and what was called."""
        objects = {}
        for node in (one for outer in nodes for one in ast.walk(outer)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made = self._named(module, ast.unparse(node.value.func).split("."))
                objects |= {t.id: made for t in node.targets if isinstance(t, ast.Name)}
        return objects

    def _statements(
        self, module: str, statements: Sequence[ast.stmt], objects: Mapping[str, tuple[str, str]]
    ) -> None:
        for statement in statements:
            for call in _calls(statement):
                self._call(module, call, objects)

    def _call(self, module: str, call: ast.Call, objects: Mapping[str, tuple[str, str]]) -> None:
        name = _callee(call)
        if name == "publish":
            raise _Published
        if name in ACCESSORS:
            self.found.append(f"{module}:{call.lineno}: {name}() before publish")
            return
        target = self._target(module, call, objects)
        if target is not None:
            self._function(*target)

    def _target(
        self, module: str, call: ast.Call, objects: Mapping[str, tuple[str, str]]
    ) -> tuple[str, str] | None:
        """The project's function that a call names: a plain one, a class's constructor, or a method."""
        where, name = self._named(module, ast.unparse(call.func).split("."))
        if isinstance(call.func, ast.Attribute):
            owner = call.func.value
            if isinstance(owner, ast.Name) and owner.id in objects:
                where, its_class = objects[owner.id]
                name = f"{its_class}.{call.func.attr}"
            elif isinstance(owner, ast.Call):
                where, its_class = self._named(module, ast.unparse(owner.func).split("."))
                name = f"{its_class}.{call.func.attr}"
        for candidate in (name, f"{name}.__init__"):
            if candidate in self.own.get(where, {}):
                return where, candidate
        return None

    def _named(self, module: str, parts: list[str]) -> tuple[str, str]:
        """Dotted parts → (module, name in it)."""
        where, first = self.imported[module].get(parts[0], (module, parts[0]))
        where = where or module
        if f"{where}.{first}" in self.own and len(parts) > 1:  # `from package import module`
            where, first, parts = f"{where}.{first}", parts[1], parts[1:]
        return where, ".".join([first, *parts[1:]])
