"""Computing derived leaves from a whole resolved view, and noticing what each was computed from."""

from __future__ import annotations

from collections.abc import Mapping

from diptych.common_config.namespaces import DERIVED, namespace_of
from diptych.common_config.programs import Program


class _View:
    """Every leaf as an attribute. Remembers which were read, also through other derived leaves."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values
        self._computing: list[str] = []
        self._reads: set[str] = set()

    def __getattr__(self, name: str) -> object:
        if name in self._values:
            self._reads.add(name)
            return self._values[name]
        if name not in DERIVED:
            raise AttributeError(f"derived leaf {self._computing[-1]} reads {name}, which this program lacks")
        if name in self._computing:
            raise RecursionError(
                "derived leaves depend on each other: " + " → ".join([*self._computing, name])
            )
        self._computing.append(name)
        value = DERIVED[name].compute(self)
        self._computing.pop()
        return value


def derive_all(
    program: Program, values: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, frozenset[str]]]:
    """Each derived leaf of the program, and the names of the leaves that it was computed from."""
    derived: dict[str, object] = {}
    inputs: dict[str, frozenset[str]] = {}
    for name in DERIVED:
        if namespace_of(name) in program.namespaces:
            view = _View(values)
            derived[name] = view.__getattr__(name)
            inputs[name] = frozenset(view._reads)
    return derived, inputs
