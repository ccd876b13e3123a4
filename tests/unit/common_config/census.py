"""Finds every use of a launch record or a bag that the design forbids, outside `common_config`. What holds a
record or a bag, `record_flow` says."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from unit.common_config.record_flow import (
    BUILDER,
    MAKERS,
    Flow,
    Function,
    Scope,
    callee,
    own_nodes,
    plain_name,
)

from diptych.common_config.derivation import derive_all
from diptych.common_config.namespaces import DERIVED, LEAVES, NAMESPACES
from diptych.common_config.record import LaunchConfig
from diptych.common_config.rules import RULES

DYNAMIC = {"getattr", "setattr", "delattr", "hasattr", "vars", "asdict", "__setattr__", "__getattribute__"}
ACCESSORS = {f"get_{name}" for name in NAMESPACES} | {"get_context", "readback"}
MUST_BE_CALLED = ACCESSORS | MAKERS - {"LaunchConfig"}
"""Never passed around or renamed, so that a call of them is seen to be one."""


def census(modules: Mapping[str, ast.Module]) -> list[str]:
    """`module:line: what is wrong`, in order."""
    return _Census(modules).violations()


def reads(modules: Mapping[str, ast.Module]) -> set[str]:
    """Names that are read from bags and records."""
    return {name for _, name in readers(modules)}


def readers(modules: Mapping[str, ast.Module]) -> set[tuple[str, str]]:
    """(module, name) of what is read from bags and records."""
    return _Census(modules).readers()


def reads_by_function(modules: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """`module:line function` → what it reads from bags and records."""
    return _Census(modules).reads_by_function()


def overlaid_reads(modules: Mapping[str, ast.Module]) -> set[str]:
    """Names whose value an engine is asked for: `config_value("name")`."""
    return {
        node.args[0].value
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and callee(node) == "config_value" and node.args
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


class _Census(Flow):
    def readers(self) -> set[tuple[str, str]]:
        """Leaves that are read as attributes of a bag or a record, and in which module."""
        return {(scope.module, name) for scope in self.scopes for name in self._reads(scope)}

    def reads_by_function(self) -> dict[str, set[str]]:
        found = {}
        for scope in self.scopes:
            if isinstance(scope.node, Function) and (names := self._reads(scope)):
                found[f"{scope.module}:{scope.node.lineno} {scope.node.name}"] = names
        return found

    def _reads(self, scope: Scope) -> set[str]:
        return {
            node.attr
            for node in own_nodes(scope.node)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and self.kind(node.value, scope) is not None
        }

    # ---- what is forbidden ------------------------------------------------------------------------

    def violations(self) -> list[str]:
        found = []
        for scope in self.scopes:
            nodes = [*own_nodes(scope.node)]
            called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
            for node in nodes:
                messages = [*self._wrong(node, scope)]
                if isinstance(node, ast.Name | ast.Attribute) and id(node) not in called:
                    messages += self._not_called(node)
                found += [(scope.module, getattr(node, "lineno", 0), message) for message in messages]
        return [f"{module}:{line}: {message}" for module, line, message in sorted(set(found))]

    def _wrong(self, node: ast.AST, scope: Scope) -> Iterator[str]:
        if isinstance(node, ast.Attribute):
            kind = self.kind(node.value, scope)
            if kind == "record":
                yield from self._record_attribute(node, scope)
            elif kind is not None:
                yield from self._bag_attribute(node, kind)
        elif isinstance(node, ast.Call):
            yield from self._call(node, scope)
        elif isinstance(node, ast.Subscript):
            yield from self._by_name(node.value, node.slice, scope)
        elif isinstance(node, ast.MatchClass) and plain_name(node.cls) == "LaunchConfig":
            yield from (f"reads {name} from a record by a pattern" for name in node.kwd_attrs)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and self.kind(node.value, scope) == "record":
            yield from self._keeps(node, scope)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diptych.common_config"):
            renamed = [alias.name for alias in node.names if alias.asname not in (None, alias.name)]
            yield from (f"imports {name} of common_config under another name" for name in renamed)

    def _not_called(self, node: ast.Name | ast.Attribute) -> list[str]:
        """An accessor, or what makes a record, under another name or handed on."""
        name = plain_name(node)
        if name not in MUST_BE_CALLED or not isinstance(node.ctx, ast.Load):
            return []
        if isinstance(node, ast.Attribute) and "common_config" not in ast.unparse(node.value):
            return []
        return [f"hands {name} around instead of calling it"]

    def _keeps(self, node: ast.Assign | ast.AnnAssign, scope: Scope) -> Iterator[str]:
        targets = [one for t in (node.targets if isinstance(node, ast.Assign) else [node.target])
                   for one in ast.walk(t)]  # fmt: skip
        names = {one.id for one in targets if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        homes = [scope.elsewhere.get(name, scope) for name in names]
        if any(isinstance(home.node, ast.Module) for home in homes):
            yield "keeps a record in a module"
        if any(isinstance(one, ast.Attribute) for one in targets):
            yield "parks a record on an object"

    def _by_name(self, holder: ast.expr, key: ast.expr, scope: Scope) -> Iterator[str]:
        """`record.values()["port"]`, `readback()["record"]["port"]`."""
        if isinstance(key, ast.Constant) and key.value in {*LEAVES, *DERIVED} and not scope.builder:
            shown = any(isinstance(one, ast.Call) and callee(one) == "readback" for one in ast.walk(holder))
            if shown or self.kind(holder, scope) == "record":
                yield f"reads {key.value} from a record by its name; read the bag"

    def _record_attribute(self, node: ast.Attribute, scope: Scope) -> Iterator[str]:
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

    def _call(self, call: ast.Call, scope: Scope) -> Iterator[str]:
        name = callee(call)
        if name == "get" and isinstance(call.func, ast.Attribute) and call.args:
            yield from self._by_name(call.func.value, call.args[0], scope)
        if name not in DYNAMIC:
            return
        owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        for one in (*owner, *call.args[:1]):
            kind = self.kind(one, scope)
            if kind is not None:
                what = "a record" if kind == "record" else f"the bag {kind}"
                yield f"uses {name} on {what}; name the leaf in the code"
