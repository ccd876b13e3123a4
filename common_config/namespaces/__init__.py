"""Every namespace, by the name of its accessor: the one list that everything else is generated from."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.common_config.declare import DerivedLeaf, Leaf, Namespace
from diptych.common_config.namespaces.device import Device
from diptych.common_config.namespaces.disagg import Disagg
from diptych.common_config.namespaces.exec import Exec, Features, Graph, Kernel, Overlap
from diptych.common_config.namespaces.memory import Memory
from diptych.common_config.namespaces.model import Model
from diptych.common_config.namespaces.observability import Observability
from diptych.common_config.namespaces.parallel import Parallel
from diptych.common_config.namespaces.router import PrefillAddress, Router
from diptych.common_config.namespaces.schedule import Schedule
from diptych.common_config.namespaces.serving import Serving
from diptych.common_config.namespaces.spec import Spec

NAMESPACES: dict[str, type[Namespace]] = {
    "model": Model,
    "schedule": Schedule,
    "memory": Memory,
    "exec": Exec,
    "device": Device,
    "parallel": Parallel,
    "disagg": Disagg,
    "serving": Serving,
    "spec": Spec,
    "observability": Observability,
    "router": Router,
}


def declarations(namespace: str) -> Iterator[tuple[str, type[Namespace]]]:
    """A namespace's own declaration and those of its groups, as (`exec` or `exec.kernel`, declaration)."""

    def walk(path: str, declaration: type[Namespace]) -> Iterator[tuple[str, type[Namespace]]]:
        yield path, declaration
        for name, nested in declaration.groups.items():
            yield from walk(f"{path}.{name}", nested)

    yield from walk(namespace, NAMESPACES[namespace])


def _index() -> tuple[dict[str, Leaf], dict[str, DerivedLeaf], dict[str, str]]:
    leaves: dict[str, Leaf] = {}
    derived: dict[str, DerivedLeaf] = {}
    paths: dict[str, str] = {}
    for namespace in NAMESPACES:
        for path, declaration in declarations(namespace):
            for name in (*declaration.leaves, *declaration.derived):
                if name in paths:
                    raise TypeError(f"leaf {name} is declared by both {paths[name]} and {path}")
                paths[name] = path
            leaves.update(declaration.leaves)
            derived.update(declaration.derived)
    return leaves, derived, paths


LEAVES, DERIVED, PATHS = _index()
"""Every leaf by name, every derived leaf by name, and the path (`exec.kernel`) of each."""


def namespace_of(name: str) -> str:
    """The namespace of a leaf or derived leaf."""
    return PATHS[name].partition(".")[0]


__all__ = [
    "DERIVED",
    "LEAVES",
    "NAMESPACES",
    "PATHS",
    "Device",
    "Disagg",
    "Exec",
    "Features",
    "Graph",
    "Kernel",
    "Memory",
    "Model",
    "Observability",
    "Overlap",
    "Parallel",
    "PrefillAddress",
    "Router",
    "Schedule",
    "Serving",
    "Spec",
    "declarations",
    "namespace_of",
]
