"""What this process has published: sealed bags, who may read them, and every override since.

The bags are slotted objects that stay the same for the life of a publication; overrides change their slots in
place, so every later read sees them. Each leaf has up to three layers: the scoped override that was entered
last, else the permanent override or stamp, else the published value.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diptych.common_config.declare import Namespace
from diptych.common_config.derivation import derive_all
from diptych.common_config.errors import ConfigError
from diptych.common_config.namespaces import DERIVED, LEAVES, PATHS, declarations, namespace_of
from diptych.common_config.programs import Role
from diptych.common_config.record import LaunchConfig, did_you_mean
from diptych.common_config.role_sets import ROLE_SETS, Mode
from diptych.common_config.values import BadValue, check, plain

logger = logging.getLogger("diptych.config")

_set = object.__setattr__  # bags are sealed against ordinary assignment


class Context:
    """One publication in this process."""

    def __init__(self, record: LaunchConfig, role: Role, mode: Mode, record_file: Path | None) -> None:
        self.role = role
        self.mode = mode
        self.record_file = record_file
        self.program = record.program
        self._record = record
        self._lock = threading.RLock()
        derived, self._inputs = derive_all(record.program, record.values())
        self._published: dict[str, object] = {**record.values(), **derived}
        self._permanent: dict[str, object] = {}
        self._scoped: list[dict[str, object]] = []
        self._log: list[dict[str, object]] = []
        allowed = ROLE_SETS[role] if mode is Mode.ENFORCE else None
        self.readable = frozenset(
            name for name in record.program.namespaces if allowed is None or name in allowed
        )
        """The namespaces that this role may read."""
        self.bags: dict[str, Namespace] = {}
        """By path: `exec`, `exec.kernel`."""
        for namespace in record.program.namespaces:
            for path, declaration in declarations(namespace):
                self.bags[path] = declaration.bag_type()
            for path, declaration in declarations(namespace):
                for name in (*declaration.leaves, *declaration.derived):
                    _set(self.bags[path], name, self._published[name])
                for name in declaration.groups:
                    _set(self.bags[path], name, self.bags[f"{path}.{name}"])

    def override(self, source: str, /, **leaves: object) -> None:
        """Change leaves for good, derived ones included: all of them or, with a `ConfigError`, none. Logged,
        and in the readback. The record stays what was asked. Leaves derived from these do not move."""
        with self._lock:
            self._apply(source, self._checked(f"override by {source}", leaves))

    def restamp(self, source: str, /, **leaves: object) -> None:
        """Change leaves of `parallel` after an elastic rescale, and with them everything derived from them.
        All or none, logged like an override. Raises `ConfigError`."""
        with self._lock:
            what = f"restamp by {source}"
            values = self._checked(what, leaves)
            wrong = [name for name in values if namespace_of(name) != "parallel" or name in DERIVED]
            if wrong:
                raise ConfigError(
                    [f"{what}: {name} is not an input of parallel; override it instead" for name in wrong]
                )
            inputs = {name: self._lasting(name) for name in self._published if name in LEAVES} | values
            derived, _ = derive_all(self.program, inputs)
            moved = {name: value for name, value in derived.items() if self._inputs[name] & set(values)}
            self._apply(source, values | moved)

    def overrides(self) -> list[dict[str, object]]:
        """The log of permanent overrides and stamps, oldest first: source, leaf, old and new value."""
        return [dict(entry) for entry in self._log]

    def overridden(self) -> list[str]:
        """Names of the leaves that hold a permanent override or stamp."""
        return list(self._permanent)

    @contextmanager
    def scoped(self, bag: Namespace, leaves: Mapping[str, object]) -> Iterator[None]:
        """See `Namespace.override`."""
        path = next((path for path, candidate in self.bags.items() if candidate is bag), None)
        if path is None:
            raise ConfigError(
                [f"this {type(bag).__name__} bag belongs to an earlier publication; read it again"]
            )
        with self._lock:
            layer = self._checked(f"scoped override of {path}", leaves, path)
            self._scoped.append(layer)
            self._refresh(layer)
        try:
            yield
        finally:
            with self._lock:
                self._scoped = [entry for entry in self._scoped if entry is not layer]
                self._refresh(layer)

    def effective(self, name: str) -> object:
        """See `diptych.common_config.effective_value`."""
        return plain(LEAVES.get(name), getattr(self.bags[PATHS[name]], name))

    def readback(self) -> dict[str, Any]:
        """See `diptych.common_config.readback`."""
        namespaces = [name for name in self.program.namespaces if name in self.readable]
        return {
            "program": self.program.value,
            "role": self.role.value,
            "role_namespaces": self.mode.value,
            "bags": {name: as_dict(self.bags[name]) for name in namespaces},
            "overrides": self.overrides(),
            "scoped_overrides": sorted({name for layer in self._scoped for name in layer}),
            "record": self._record.redacted(),
            "provenance": self._record.redacted_provenance(),
        }

    def _lasting(self, name: str) -> object:
        return self._permanent.get(name, self._published[name])

    def _checked(self, what: str, leaves: Mapping[str, object], path: str | None = None) -> dict[str, object]:
        values: dict[str, object] = {}
        problems = []
        for name, value in leaves.items():
            if name not in self._published:
                problems.append(f"{what}: no leaf {name}{did_you_mean(name, self._published)}")
            elif path is not None and PATHS[name] != path:
                problems.append(f"{what}: {name} is a leaf of {PATHS[name]}")
            elif namespace_of(name) not in self.readable:
                problems.append(
                    f"{what}: role {self.role.value} may not touch {name} of {namespace_of(name)}"
                )
            elif name in DERIVED:
                if type(value) is type(self._published[name]):
                    values[name] = value
                else:
                    problems.append(
                        f"{what}: {name}: {value!r} is not a {type(self._published[name]).__name__}"
                    )
            else:
                try:
                    values[name] = check(LEAVES[name], value, final=True)
                except BadValue as error:
                    problems.append(f"{what}: {name}: {error}")
        if problems:
            raise ConfigError(problems)
        return values

    def _apply(self, source: str, values: Mapping[str, object]) -> None:
        for name, value in values.items():
            leaf = LEAVES.get(name)
            entry: dict[str, object] = {
                "source": source,
                "leaf": name,
                "old": plain(leaf, self._lasting(name)),
                "new": plain(leaf, value),
            }
            self._log.append(entry)
            logger.info("%s overrides %s: %s → %s", source, name, entry["old"], entry["new"])
        self._permanent.update(values)
        self._refresh(values)

    def _refresh(self, names: Mapping[str, object]) -> None:
        for name in names:
            value = self._lasting(name)
            for layer in self._scoped:
                value = layer.get(name, value)
            _set(self.bags[PATHS[name]], name, value)


def as_dict(bag: Namespace) -> dict[str, object]:
    """The effective leaves of a bag and its groups, JSON-able, secrets hidden."""
    leaves = {
        name: plain(type(bag).leaves.get(name), getattr(bag, name))
        for name in (*type(bag).leaves, *type(bag).derived)
    }
    return leaves | {name: as_dict(getattr(bag, name)) for name in type(bag).groups}
