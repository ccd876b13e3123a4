"""Finds every use of a launch record or a bag that the design forbids, outside `common_config`.

Records are followed by where they come from, not by what they are called: parameters annotated
`LaunchConfig`, what makes or returns one, aliases, parked attributes, module-level names, copies, and
parameters of helpers that are given one. Nothing is listed by hand; names spread until nothing new is found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from diptych.common_config.derivation import derive_all
from diptych.common_config.namespaces import DERIVED, LEAVES, NAMESPACES
from diptych.common_config.record import LaunchConfig
from diptych.common_config.rules import RULES

MAKERS = {"parse_command_line", "resolve", "LaunchConfig"}
COPIERS = {"copy", "deepcopy", "replace", "derive", "cast"}
BUILDER = "builds_from_record"
Function = ast.FunctionDef | ast.AsyncFunctionDef
DYNAMIC = {"getattr", "setattr", "delattr", "hasattr", "vars", "asdict", "__setattr__", "__getattribute__"}


def census(modules: Mapping[str, ast.Module]) -> list[str]:
    """`module:line: what is wrong`, in order."""
    return _Census(modules).violations()


def reads(modules: Mapping[str, ast.Module]) -> set[str]:
    """Names that are read from bags and records."""
    return {name for _, name in readers(modules)}


def readers(modules: Mapping[str, ast.Module]) -> set[tuple[str, str]]:
    """(module, name) of what is read from bags and records."""
    return _Census(modules).readers()


def overlaid_reads(modules: Mapping[str, ast.Module]) -> set[str]:
    """Names whose value an engine is asked for: `config_value("name")`."""
    return {
        node.args[0].value
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _callee(node) == "config_value" and node.args
        if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    }


def unread(modules: Mapping[str, ast.Module], record: LaunchConfig) -> set[str]:
    """Declared leaves that nothing uses: no code reads them from a bag, a record or an engine's overlay, and
    nothing that is used derives or resolves from them (a check that refuses values is no use)."""
    used = reads(modules) | overlaid_reads(modules)
    _, inputs = derive_all(record.program, record.values())
    for name in used & set(DERIVED):
        used = used | inputs[name]
    before = -1
    while before != (before := len(used)):
        used = used.union(*(rule.needs for rule in RULES if rule.leaf in used))
    return {*LEAVES, *DERIVED} - used


def _callee(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _names(node: ast.expr | None) -> set[str]:
    """The names in an expression; in a quoted annotation too."""
    if node is None:
        return set()
    quoted = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    words = {word for text in quoted for word in re.findall(r"\w+", text)}
    return words | {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of the functions in it (but with those of its classes)."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _own_nodes(child)


def _arguments(function: Function | ast.Lambda) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


class _Scope:
    def __init__(self, module: str, node: ast.AST, parent: _Scope | None, builder: bool) -> None:
        self.module, self.node, self.parent, self.builder = module, node, parent, builder
        self.kinds: dict[str, str] = {}
        """Name → `record`, or the namespace of a bag."""

    def kind(self, name: str) -> str | None:
        if name in self.kinds:
            return self.kinds[name]
        return self.parent.kind(name) if self.parent is not None else None


class _Census:
    def __init__(self, modules: Mapping[str, ast.Module]) -> None:
        self.scopes: list[_Scope] = []
        self.functions: dict[str, list[tuple[Function, _Scope]]] = {}
        self.returning: dict[str, str] = {}
        self.parked: dict[str, str] = {}
        for name, tree in modules.items():
            self._open(name, tree, None, False)
        before = -1
        while before != (before := self._size()):
            for scope in self.scopes:
                self._spread(scope)

    def _open(self, module: str, node: ast.AST, parent: _Scope | None, builder: bool) -> None:
        scope = _Scope(module, node, parent, builder)
        self.scopes.append(scope)
        for child in _own_nodes(node):
            if isinstance(child, Function):
                marked = any(BUILDER in _names(decorator) for decorator in child.decorator_list)
                self._open(module, child, scope, builder or marked)
                inner = next(s for s in reversed(self.scopes) if s.node is child)
                self.functions.setdefault(child.name, []).append((child, inner))
            elif isinstance(child, ast.Lambda):
                self._open(module, child, scope, builder)

    def _size(self) -> int:
        return sum(len(scope.kinds) for scope in self.scopes) + len(self.returning) + len(self.parked)

    def _kind(self, node: ast.expr | None, scope: _Scope) -> str | None:
        """What an expression is: `record`, a bag's namespace, or neither."""
        if isinstance(node, ast.Name):
            return scope.kind(node.id)
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Starred):
            return self._kind(node.value, scope)
        if isinstance(node, ast.IfExp):
            return self._kind(node.body, scope) or self._kind(node.orelse, scope)
        if isinstance(node, ast.BoolOp):
            return next((kind for value in node.values if (kind := self._kind(value, scope))), None)
        if isinstance(node, ast.Attribute):
            inner = self._kind(node.value, scope)
            if inner in NAMESPACES and node.attr in NAMESPACES[inner].groups:
                return inner
            return self.parked.get(node.attr)
        if isinstance(node, ast.Call):
            return self._kind_of_call(node, scope)
        return None

    def _kind_of_call(self, call: ast.Call, scope: _Scope) -> str | None:
        name = _callee(call)
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if name.startswith("get_") and name[4:] in NAMESPACES and not call.args:
            return name[4:]
        if name in MAKERS and (owner is None or "common_config" in _names(owner)):
            return "record"
        if name == "from_bytes" and owner is not None and "LaunchConfig" in _names(owner):
            return "record"
        if name in COPIERS:
            candidates = [*([owner] if owner is not None else []), *call.args]
            return next((kind for one in candidates if (kind := self._kind(one, scope))), None)
        return self.returning.get(name)

    def _bind(self, target: ast.expr, kind: str | None, scope: _Scope) -> None:
        if kind is None:
            return
        if isinstance(target, ast.Name):
            scope.kinds.setdefault(target.id, kind)
        elif isinstance(target, ast.Attribute):
            self.parked.setdefault(target.attr, kind)

    def _spread(self, scope: _Scope) -> None:
        node = scope.node
        if isinstance(node, Function):
            for argument in _arguments(node):
                if "LaunchConfig" in _names(argument.annotation):
                    scope.kinds.setdefault(argument.arg, "record")
            returned = "LaunchConfig" in _names(node.returns)
            kind = "record" if returned else None
            for child in _own_nodes(node):
                if isinstance(child, ast.Return):
                    kind = kind or self._kind(child.value, scope)
            if kind is not None:
                self.returning.setdefault(node.name, kind)
                if any("property" in _names(d) for d in node.decorator_list):
                    self.parked.setdefault(node.name, kind)
        for child in _own_nodes(node):
            if isinstance(child, ast.Assign):
                for target in child.targets:
                    self._bind(target, self._kind(child.value, scope), scope)
            elif isinstance(child, ast.AnnAssign):
                kind = "record" if "LaunchConfig" in _names(child.annotation) else None
                self._bind(child.target, kind or self._kind(child.value, scope), scope)
                if kind and isinstance(child.target, ast.Name):  # a field of a class, perhaps
                    self.parked.setdefault(child.target.id, kind)
            elif isinstance(child, ast.NamedExpr):
                self._bind(child.target, self._kind(child.value, scope), scope)
            elif isinstance(child, ast.withitem) and child.optional_vars is not None:
                if (
                    isinstance(child.context_expr, ast.Call)
                    and _callee(child.context_expr) == "override_config"
                ):
                    self._bind(child.optional_vars, "record", scope)
            elif isinstance(child, ast.Call):
                self._spread_into(child, scope)

    def _spread_into(self, call: ast.Call, scope: _Scope) -> None:
        """A helper that is given a record has a record for a parameter."""
        for function, inner in self.functions.get(_callee(call), []):
            names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
            if names[:1] in (["self"], ["cls"]):
                names = names[1:]
            given = dict(zip(names, call.args, strict=False))
            given |= {k.arg: k.value for k in call.keywords if k.arg is not None}
            for name, value in given.items():
                kind = self._kind(value, scope)
                if kind is not None:
                    inner.kinds.setdefault(name, kind)

    def readers(self) -> set[tuple[str, str]]:
        """Leaves that are read as attributes of a bag or a record, and in which module."""
        return {
            (scope.module, node.attr)
            for scope in self.scopes
            for node in _own_nodes(scope.node)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and self._kind(node.value, scope) is not None
        }

    # ---- what is forbidden ------------------------------------------------------------------------

    def violations(self) -> list[str]:
        found = []
        for scope in self.scopes:
            for node in _own_nodes(scope.node):
                for message in self._wrong(node, scope):
                    found.append((scope.module, getattr(node, "lineno", 0), message))
        return [f"{module}:{line}: {message}" for module, line, message in sorted(set(found))]

    def _wrong(self, node: ast.AST, scope: _Scope) -> Iterator[str]:
        if isinstance(node, ast.Attribute):
            kind = self._kind(node.value, scope)
            if kind == "record":
                yield from self._record_attribute(node, scope)
            elif kind is not None:
                yield from self._bag_attribute(node, kind)
        elif isinstance(node, ast.Call):
            yield from self._call(node, scope)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and self._kind(node.value, scope) == "record":
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(scope.node, ast.Module):
                yield "keeps a record in a module"
            if any(isinstance(target, ast.Attribute) for target in targets):
                yield "parks a record on an object"

    def _record_attribute(self, node: ast.Attribute, scope: _Scope) -> Iterator[str]:
        if isinstance(node.ctx, ast.Store | ast.Del):
            yield f"assigns to {node.attr} of a record"
        elif node.attr == "__dict__":
            yield "reads a record dynamically"
        elif node.attr in LEAVES and not scope.builder:
            yield f"reads {node.attr} from a record; read the bag, or mark the function @{BUILDER}"

    def _bag_attribute(self, node: ast.Attribute, namespace: str) -> Iterator[str]:
        if isinstance(node.ctx, ast.Store | ast.Del):
            yield f"assigns to {node.attr} of the bag {namespace}"
        declared = {"override"}
        todo = [NAMESPACES[namespace]]
        while todo:
            declaration = todo.pop()
            declared |= {*declaration.leaves, *declaration.derived, *declaration.groups}
            todo += declaration.groups.values()
        if node.attr not in declared:
            yield f"reads {node.attr}, which {namespace} doesn't declare"

    def _call(self, call: ast.Call, scope: _Scope) -> Iterator[str]:
        name = _callee(call)
        if name not in DYNAMIC:
            return
        owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        for one in (*owner, *call.args[:1]):
            kind = self._kind(one, scope)
            if kind is not None:
                what = "a record" if kind == "record" else f"the bag {kind}"
                yield f"uses {name} on {what}; name the leaf in the code"
