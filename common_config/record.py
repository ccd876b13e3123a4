"""The launch record: what this program was asked to do, resolved, frozen, with where each value came from."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Never, NoReturn, TypeVar

import msgspec

from diptych.common_config.declare import Leaf
from diptych.common_config.errors import ConfigError, FrozenRecordError
from diptych.common_config.namespaces import (
    LEAVES,
    Device,
    Disagg,
    Exec,
    Kernel,
    Memory,
    Model,
    Observability,
    Parallel,
    Router,
    Schedule,
    Serving,
    Spec,
    namespace_of,
)
from diptych.common_config.programs import Program
from diptych.common_config.values import BadValue, as_text, check, plain


class Provenance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a field's value came from."""

    source: str
    """`default`, `file`, `env`, `flag`, `resolved` or `derived`."""
    origin: str = ""
    """The flag, variable, file and line, rule or deriving function."""
    asked: Any = None
    """Where a rule changed a value: what was asked for (never a secret)."""
    asked_from: str = ""
    """Where that was asked."""

    def __str__(self) -> str:
        text = f"{self.source}: {self.origin}" if self.origin else self.source
        if not self.asked_from:
            return text
        return f"{text} (asked: {msgspec.json.encode(self.asked).decode()} by {self.asked_from})"


def leaves_of(program: Program) -> dict[str, Leaf]:
    """The leaves that this program has, in the order of the declarations."""
    return {name: leaf for name, leaf in LEAVES.items() if namespace_of(name) in program.namespaces}


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean page_size?`, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    program: str
    values: dict[str, Any]
    provenance: dict[str, Provenance]


class LaunchConfig(
    Model,
    Schedule,
    Memory,
    Exec,
    Kernel,
    Device,
    Parallel,
    Disagg,
    Serving,
    Spec,
    Observability,
    Router,
    slots=(*LEAVES, "program", "provenance"),
):
    """One flat frozen record. Only `common_config` and the functions that build from a supplied record
    (marked `@builds_from_record`) read it; everything else reads the published bags."""

    program: Program
    provenance: Mapping[str, Provenance]

    def __init__(
        self, program: Program, values: Mapping[str, object], provenance: Mapping[str, Provenance]
    ) -> None:
        """`values` and `provenance` hold exactly the program's leaves, already checked."""
        object.__setattr__(self, "program", program)
        object.__setattr__(self, "provenance", types.MappingProxyType(dict(provenance)))
        for name in leaves_of(program):
            object.__setattr__(self, name, values[name])

    if not TYPE_CHECKING:  # so that mypy still finds a misspelt field

        def __getattr__(self, name: str) -> Never:
            # Reached only for what __init__ did not set.
            if name in LEAVES:
                raise AttributeError(
                    f"{name} belongs to the namespace {namespace_of(name)}, "
                    f"which {self.program.value} doesn't have"
                )
            raise AttributeError(f"the record has no field {name!r}{did_you_mean(name, LEAVES)}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenRecordError(
            f"the record is frozen: {name!r} can't be assigned; before publishing use "
            f"record.derive(source, {name}=…), afterwards get_context().override(source, {name}=…)"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenRecordError(f"the record is frozen: {name!r} can't be deleted")

    def override(self, **leaves: object) -> NoReturn:
        raise FrozenRecordError(
            "a record isn't overridden: derive a changed copy before publishing, "
            "or override the bags afterwards"
        )

    def values(self) -> dict[str, object]:
        """Every field of this program by name."""
        return {name: getattr(self, name) for name in leaves_of(self.program)}

    def derive(self, source: str, /, **fields: object) -> LaunchConfig:
        """A changed copy for building what is published later. Nothing is resolved again; this record and
        the bags stay as they are. `source` says who derives. Raises `ConfigError` on unknown names and bad
        values."""
        values, provenance = self.values(), dict(self.provenance)
        problems = []
        for name, value in fields.items():
            leaf = leaves_of(self.program).get(name)
            if leaf is None:
                problems.append(f"derive by {source}: no field {name}{did_you_mean(name, values)}")
                continue
            try:
                values[name] = check(leaf, value, final=True)
            except BadValue as error:
                problems.append(f"derive by {source}: {name}: {error}")
            provenance[name] = Provenance("derived", source)
        if problems:
            raise ConfigError(problems)
        return LaunchConfig(self.program, values, provenance)

    def to_bytes(self) -> bytes:
        """JSON, secrets included: for a process of this worker, over a pipe, never for a log or a file."""
        values = {name: plain(LEAVES[name], v, redact=False) for name, v in self.values().items()}
        return msgspec.json.encode(_Wire(self.program.value, values, dict(self.provenance)))

    @classmethod
    def from_bytes(cls, data: bytes) -> LaunchConfig:
        """The record that `to_bytes` wrote. Raises `ConfigError` on anything else."""
        try:
            wire = msgspec.json.decode(data, type=_Wire)
            program = Program(wire.program)
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError([f"not a launch record: {error}"]) from None
        leaves = leaves_of(program)
        if set(wire.values) != set(leaves) or set(wire.provenance) != set(leaves):
            raise ConfigError(["not a launch record of this version: its fields differ"])
        values, problems = {}, []
        for name, value in wire.values.items():
            try:
                values[name] = check(leaves[name], value, final=True)
            except BadValue as error:
                problems.append(f"launch record: {name}: {error}")
        if problems:
            raise ConfigError(problems)
        return cls(program, values, wire.provenance)

    def redacted(self) -> dict[str, object]:
        """Every field by name, JSON-able, secrets hidden: for logs and `/server_info`."""
        return {name: plain(LEAVES[name], value) for name, value in self.values().items()}

    def redacted_provenance(self) -> dict[str, str]:
        """Where each field's value came from, as text."""
        return {name: str(where) for name, where in self.provenance.items()}

    def __repr__(self) -> str:
        return f"LaunchConfig({self.program.value}, {self.redacted()!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LaunchConfig):
            return NotImplemented
        return (self.program, self.values(), self.provenance) == (
            other.program,
            other.values(),
            other.provenance,
        )

    __hash__ = None  # type: ignore[assignment]


def environment_of(
    record: LaunchConfig, program: Program, *, without: Collection[str] = ()
) -> dict[str, str | None]:
    """The `DIPTYCH_` variables with which `program` started by this one resolves the same values: what was
    asked, by whatever means, and what only this program has as a default. Secrets included: an environment is
    the child's alone, unlike its arguments. Laid over this process's own environment, out of which None takes
    a variable: the leaves `without` stay at their defaults."""
    variables: dict[str, str | None] = {}
    for name, leaf in leaves_of(program).items():
        if name in without:
            variables[leaf.env] = None
            continue
        if name not in record.provenance:
            continue
        value, where = getattr(record, name), record.provenance[name]
        asked = where.source not in ("default", "resolved") or bool(where.asked_from)
        if asked or (where.source == "default" and value != leaf.default_for(program)):
            variables.update(_variable(leaf, value))
    return variables


def _variable(leaf: Leaf, value: object) -> dict[str, str]:
    if value is None or value == ():
        return {leaf.env: "none"} if leaf.optional and leaf.kind is not str else {}
    return {leaf.env: as_text(leaf, value)}


def hide_secret(name: str, value: object) -> object:
    """A value as it may be shown under this name: JSON-able, `<redacted>` if it is a secret leaf's."""
    return plain(LEAVES.get(name), value)


def check_value(name: str, value: object) -> object:
    """The value, if the leaf of this name takes it. Raises `BadValue`, which says what is accepted."""
    return check(LEAVES[name], value, final=True)


F = TypeVar("F", bound=Callable[..., Any])


def builds_from_record(function: F) -> F:
    """Marks a function whose contract is to build from a record that it is given (to start a process with it,
    say). Only such functions may read a record outside this package; the census test goes by this mark."""
    return function
