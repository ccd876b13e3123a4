"""Where records and bags go: every name, attribute and parameter of the project that holds one.

They are followed by where they come from, not by what they are called: parameters annotated `LaunchConfig`,
what makes or returns one, aliases, containers, parked attributes, module-level names, copies, and parameters
of helpers and constructors that are given one. Nothing is listed by hand; names spread until nothing new is
found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from diptych.common_config.namespaces import NAMESPACES

MAKERS = {"parse_command_line", "resolve", "LaunchConfig"}
COPIERS = {"copy", "deepcopy", "replace", "derive", "cast"}
MAPPINGS = {"values", "redacted"}
"""A record's own methods that give its fields by name."""
BUILDER = "builds_from_record"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def callee(call: ast.Call) -> str:
    """The plain name of what is called."""
    return plain_name(call.func)


def plain_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def names_in(node: ast.expr | None) -> set[str]:
    """The names in an expression; in a quoted annotation too."""
    if node is None:
        return set()
    quoted = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    words = {word for text in quoted for word in re.findall(r"\w+", text)}
    return words | {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of the functions in it (but with those of its classes)."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from own_nodes(child)


class Scope:
    def __init__(self, module: str, node: ast.AST, parent: Scope | None, builder: bool) -> None:
        self.module, self.node, self.parent, self.builder = module, node, parent, builder
        self.kinds: dict[str, str] = {}
        """Name → `record`, or the namespace of a bag."""
        self.elsewhere: dict[str, Scope] = {}
        """Names that are declared global or nonlocal, and where they live."""

    def kind(self, name: str) -> str | None:
        if name in self.kinds:
            return self.kinds[name]
        return self.parent.kind(name) if self.parent is not None else None

    @property
    def root(self) -> Scope:
        return self if self.parent is None else self.parent.root


class Flow:
    """What `kind` says of an expression in a scope, once everything has spread."""

    def __init__(self, modules: Mapping[str, ast.Module]) -> None:
        self.scopes: list[Scope] = []
        self.functions: dict[str, list[tuple[Function, Scope]]] = {}
        """By name, other names that they are given, and constructors by their class."""
        self.fields: dict[str, list[str]] = {}
        """Annotated attributes of each class, in order: the arguments of a dataclass."""
        self.returning: dict[str, str] = {}
        self.parked: dict[str, str] = {}
        for name, tree in modules.items():
            self._open(name, tree, None, False)
        before = -1
        while before != (before := self._size()):
            for scope in self.scopes:
                self._spread(scope)

    def _open(self, module: str, node: ast.AST, parent: Scope | None, builder: bool) -> Scope:
        scope = Scope(module, node, parent, builder)
        self.scopes.append(scope)
        inner: dict[ast.AST, Scope] = {}
        for child in own_nodes(node):
            if isinstance(child, Function):
                marked = any(BUILDER in names_in(decorator) for decorator in child.decorator_list)
                inner[child] = self._open(module, child, scope, builder or marked)
                self.functions.setdefault(child.name, []).append((child, inner[child]))
            elif isinstance(child, ast.Lambda):
                self._open(module, child, scope, builder)
            elif isinstance(child, ast.Global | ast.Nonlocal) and scope.parent is not None:
                home = scope.root if isinstance(child, ast.Global) else scope.parent
                scope.elsewhere |= dict.fromkeys(child.names, home)
        for child in own_nodes(node):
            if isinstance(child, ast.ClassDef):
                for entry in child.body:
                    if isinstance(entry, Function) and entry.name == "__init__":
                        self.functions.setdefault(child.name, []).append((entry, inner[entry]))
                    elif isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                        self.fields.setdefault(child.name, []).append(entry.target.id)
        return scope

    def _size(self) -> int:
        functions = sum(len(found) for found in self.functions.values())
        return (
            sum(len(scope.kinds) for scope in self.scopes)
            + len(self.returning)
            + len(self.parked)
            + functions
        )

    def kind(self, node: ast.expr | None, scope: Scope) -> str | None:
        """What an expression is: `record` (or something that holds one), a bag's namespace, or neither."""
        if isinstance(node, ast.Name):
            return scope.kind(node.id)
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Starred | ast.YieldFrom):
            return self.kind(node.value, scope)
        if isinstance(node, ast.IfExp):
            return self.kind(node.body, scope) or self.kind(node.orelse, scope)
        if isinstance(node, ast.BoolOp):
            return next((kind for value in node.values if (kind := self.kind(value, scope))), None)
        if isinstance(node, ast.Attribute):
            inner = self.kind(node.value, scope)
            if inner in NAMESPACES and node.attr in NAMESPACES[inner].groups:
                return inner
            return self.parked.get(node.attr)
        if isinstance(node, ast.Call):
            return self._kind_of_call(node, scope)
        held: list[ast.expr | None] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            held = [*node.elts]
        elif isinstance(node, ast.Dict):
            held = [*node.values]
        elif isinstance(node, ast.Subscript):
            held = [node.value]
        return "record" if any(self.kind(one, scope) == "record" for one in held) else None

    def _kind_of_call(self, call: ast.Call, scope: Scope) -> str | None:
        name = callee(call)
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if name.startswith("get_") and name[4:] in NAMESPACES and not call.args:
            return name[4:]
        if name in MAKERS and (owner is None or "common_config" in names_in(owner)):
            return "record"
        if name == "from_bytes" and owner is not None and "LaunchConfig" in names_in(owner):
            return "record"
        if name in MAPPINGS and self.kind(owner, scope) == "record":
            return "record"
        if name in COPIERS:
            candidates = [*([owner] if owner is not None else []), *call.args]
            return next((kind for one in candidates if (kind := self.kind(one, scope))), None)
        return self.returning.get(name)

    def _bind(self, target: ast.expr, kind: str | None, scope: Scope) -> None:
        if kind is None:
            return
        if isinstance(target, ast.Name):
            scope.elsewhere.get(target.id, scope).kinds.setdefault(target.id, kind)
        elif isinstance(target, ast.Attribute):
            self.parked.setdefault(target.attr, kind)
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._bind(one, kind, scope)
        elif isinstance(target, ast.Starred | ast.Subscript):
            self._bind(target.value, kind, scope)

    def _assign(self, target: ast.expr, value: ast.expr | None, scope: Scope) -> None:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assign(one, its, scope)
            return
        self._bind(target, self.kind(value, scope), scope)
        if isinstance(target, ast.Name) and isinstance(value, ast.Name):
            self._rename(value.id, target.id)

    def _rename(self, name: str, other: str) -> None:
        """A function under another name."""
        if name in self.functions and name != other:
            known = self.functions.setdefault(other, [])
            known += [entry for entry in self.functions[name] if entry not in known]
        if name in self.returning:
            self.returning.setdefault(other, self.returning[name])

    def _spread(self, scope: Scope) -> None:
        node = scope.node
        if isinstance(node, Function | ast.Lambda):
            self._spread_defaults(node.args, scope)
        if isinstance(node, Function):
            self._spread_signature(node, scope)
        for child in own_nodes(node):
            if isinstance(child, ast.Assign):
                for target in child.targets:
                    self._assign(target, child.value, scope)
            elif isinstance(child, ast.AnnAssign):
                kind = "record" if "LaunchConfig" in names_in(child.annotation) else None
                self._bind(child.target, kind or self.kind(child.value, scope), scope)
                if kind and isinstance(child.target, ast.Name):  # a field of a class, perhaps
                    self.parked.setdefault(child.target.id, kind)
            elif isinstance(child, ast.NamedExpr):
                self._assign(child.target, child.value, scope)
            elif isinstance(child, ast.For | ast.AsyncFor | ast.comprehension):
                self._bind(child.target, self.kind(child.iter, scope), scope)
            elif isinstance(child, ast.withitem) and child.optional_vars is not None:
                self._bind(child.optional_vars, self._entered(child.context_expr, scope), scope)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    self._rename(alias.name, alias.asname or alias.name)
            elif isinstance(child, ast.Call):
                self._spread_into(callee(child), child.args, child.keywords, scope)
                # partial(helper, record), to_thread(helper, record) and their like.
                for i, argument in enumerate(child.args):
                    self._spread_into(plain_name(argument), child.args[i + 1 :], child.keywords, scope)

    def _entered(self, expression: ast.expr, scope: Scope) -> str | None:
        if not isinstance(expression, ast.Call):
            return self.kind(expression, scope)
        if callee(expression) == "override_config" or any(
            self.kind(argument, scope) == "record" for argument in expression.args
        ):
            return "record"
        return self.kind(expression, scope)

    def _spread_defaults(self, arguments: ast.arguments, scope: Scope) -> None:
        outside = scope.parent or scope
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs: list[tuple[ast.arg, ast.expr | None]] = [
            *zip(positional[::-1], arguments.defaults[::-1], strict=False),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            kind = self.kind(default, outside)
            if kind is not None:
                scope.kinds.setdefault(argument.arg, kind)

    def _spread_signature(self, node: Function, scope: Scope) -> None:
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if "LaunchConfig" in names_in(argument.annotation):
                scope.kinds.setdefault(argument.arg, "record")
        kind = "record" if "LaunchConfig" in names_in(node.returns) else None
        for child in own_nodes(node):
            if isinstance(child, ast.Return | ast.Yield):
                kind = kind or self.kind(child.value, scope)
        if kind is not None:
            self.returning.setdefault(node.name, kind)
            if any("property" in names_in(d) for d in node.decorator_list):
                self.parked.setdefault(node.name, kind)

    def _spread_into(
        self, name: str, args: list[ast.expr], keywords: list[ast.keyword], scope: Scope
    ) -> None:
        """A helper that is given a record has a record for a parameter, and a dataclass parks it."""
        for function, inner in self.functions.get(name, []):
            names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
            if names[:1] in (["self"], ["cls"]):
                names = names[1:]
            given: list[tuple[str, ast.expr]] = [*zip(names, args, strict=False)]
            given += [(k.arg, k.value) for k in keywords if k.arg is not None]
            if function.args.vararg is not None:
                given += [(function.args.vararg.arg, one) for one in args[len(names) :]]
            for parameter, value in given:
                kind = self.kind(value, scope)
                if kind is not None:
                    inner.kinds.setdefault(parameter, kind)
        if name in self.fields and name not in self.functions:
            parks = [*zip(self.fields[name], args, strict=False)]
            parks += [(k.arg, k.value) for k in keywords if k.arg is not None]
            for field, value in parks:
                kind = self.kind(value, scope)
                if kind is not None:
                    self.parked.setdefault(field, kind)
