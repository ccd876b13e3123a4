"""How a namespace is declared. From one declaration come the record's field, the flag, the file and
environment key, validation, the bag's leaf and the row in the documentation.

    class Schedule(Namespace):
        page_size: int = leaf(16, help="Tokens per KV page.", ge=1, unit="tokens")
        chunked: bool = Derived(lambda view: view.chunked_prefill_size > 0, help="…")

The declaring class has no attributes of its own: its generated subclass `bag_type` holds one slot per leaf.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, NoReturn

from diptych.common_config.errors import SealedBagError
from diptych.common_config.programs import Program

REQUIRED: Final = object()
"""The default of a leaf that the operator must give."""
OPEN: Final = object()
"""The default of a leaf that a rule of resolution fills, so that no reader ever sees it empty."""


@dataclasses.dataclass(frozen=True, slots=True)
class Element:
    """How one entry of a repeatable leaf is written: up to `max_words` words on the command line."""

    parse: Callable[[Sequence[str]], object]
    """Words → entry; raises ValueError with the reason."""
    metavar: str
    words: Callable[[Mapping[str, object]], Sequence[str]] | None = None
    """A mapping from a file → the words it stands for; raises ValueError with the reason."""
    max_words: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One declared leaf."""

    name: str = ""
    kind: type = str
    """`int`, `float`, `bool`, `str`, or `tuple` for a repeatable leaf."""
    optional: bool = False
    """None may be given: left open, for resolution or the runner to fill."""
    resolved: bool = False
    """Resolution fills it when it is left open: the record and the bag never hold None."""
    default: object
    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    ge: float | None = None
    le: float | None = None
    gt: float | None = None
    also: tuple[int, ...] = ()
    """Values allowed outside the range, such as -1 for off."""
    open_means: str = ""
    """What None stands for."""
    secret: bool = False
    program_defaults: Mapping[Program, object] = dataclasses.field(default_factory=dict)
    refused_by: Mapping[Program, str] = dataclasses.field(default_factory=dict)
    """Programs that have the leaf but settle it themselves, and why: another value is refused there."""
    element: Element | None = None
    metavar: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return "DIPTYCH_" + self.name.upper()

    def default_for(self, program: Program) -> object:
        """The default of this program; REQUIRED when it has none."""
        return self.program_defaults.get(program, self.default)


@dataclasses.dataclass(frozen=True, slots=True)
class DerivedLeaf:
    """A leaf computed at publish from the whole resolved view."""

    compute: Callable[[Any], object]
    help: str
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """A nested bag."""

    name: str = ""
    declaration: type[Namespace] | None = None


def leaf(
    default: object,
    *,
    help: str,
    unit: str = "",
    choices: tuple[str, ...] = (),
    ge: float | None = None,
    le: float | None = None,
    gt: float | None = None,
    also: tuple[int, ...] = (),
    open_means: str = "",
    secret: bool = False,
    program_defaults: Mapping[Program, object] | None = None,
    refused_by: Mapping[Program, str] | None = None,
    element: Element | None = None,
    metavar: str = "",
) -> Any:
    """Declare a leaf; its type is the annotation. See `Leaf` for the arguments."""
    return Leaf(
        default=default,
        help=help,
        unit=unit,
        choices=choices,
        ge=ge,
        le=le,
        gt=gt,
        also=also,
        open_means=open_means,
        secret=secret,
        program_defaults=program_defaults or {},
        refused_by=refused_by or {},
        element=element,
        metavar=metavar,
    )


def Derived(compute: Callable[[Any], object], *, help: str) -> Any:
    """Declare a leaf computed once at publish. `compute` gets a view with every leaf of the program as an
    attribute. Overriding an input later does *not* move it: override it too, or `restamp` the input."""
    return DerivedLeaf(compute=compute, help=help)


def group() -> Any:
    """Declare a nested bag; its declaration is the annotation."""
    return Group()


def _typed(spec: Leaf, name: str, hint: Any) -> Leaf:
    arguments = typing.get_args(hint)
    optional = type(None) in arguments
    kind = next((a for a in arguments if a is not type(None)), hint) if optional else hint
    if typing.get_origin(kind) is tuple:
        kind = tuple
    if kind not in (int, float, bool, str, tuple):
        raise TypeError(f"leaf {name}: a leaf is an int, float, bool, str or a tuple, not {hint}")
    if (kind is tuple) != (spec.element is not None):
        raise TypeError(f"leaf {name}: a tuple, and nothing else, says what its elements are")
    if not spec.help.endswith("."):
        raise TypeError(f"leaf {name}: its help is a sentence that ends with a full stop")
    if spec.default is OPEN:
        return dataclasses.replace(spec, name=name, kind=kind, optional=True, resolved=True, default=None)
    if spec.default is None and not optional:
        raise TypeError(f"leaf {name}: its default is None but its type does not allow None")
    return dataclasses.replace(spec, name=name, kind=kind, optional=optional)


class NamespaceMeta(type):
    """Takes the declarations out of the class body and generates the slotted bag class."""

    leaves: dict[str, Leaf]
    derived: dict[str, DerivedLeaf]
    groups: dict[str, type[Namespace]]
    bag_type: type[Namespace]

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        body: dict[str, Any],
        *,
        slots: tuple[str, ...] | None = None,
    ) -> NamespaceMeta:
        if slots is not None or not bases:
            return super().__new__(mcls, name, bases, {**body, "__slots__": slots or ()})
        specs = {k: v for k, v in body.items() if isinstance(v, (Leaf, DerivedLeaf, Group))}
        kept = {k: v for k, v in body.items() if k not in specs}
        cls = super().__new__(mcls, name, bases, {**kept, "__slots__": ()})
        hints = typing.get_type_hints(cls)
        cls.leaves, cls.derived, cls.groups = {}, {}, {}
        for key, spec in specs.items():
            if isinstance(spec, Leaf):
                cls.leaves[key] = _typed(spec, key, hints[key])
            elif isinstance(spec, DerivedLeaf):
                cls.derived[key] = dataclasses.replace(spec, name=key)
            else:
                cls.groups[key] = hints[key]
        names = (*cls.leaves, *cls.derived, *cls.groups)
        cls.bag_type = NamespaceMeta(name, (cls,), {"__module__": body["__module__"]}, slots=names)  # type: ignore[assignment]
        return cls

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: object) -> None:
        super().__init__(name, bases, body)


class Namespace(metaclass=NamespaceMeta):
    """Base of every declaration, and so of every bag."""

    leaves: ClassVar[dict[str, Leaf]]
    derived: ClassVar[dict[str, DerivedLeaf]]
    groups: ClassVar[dict[str, type[Namespace]]]
    bag_type: ClassVar[type[Namespace]]

    def override(self, **leaves: object) -> AbstractContextManager[None]:
        """`with bag.override(leaf=value):` changes leaves of this bag until the block ends, however it ends.
        Process-wide, not per thread. Unknown names and bad values raise `ConfigError` before anything
        changes. Derived leaves stay as they are."""
        # The published context imports this module, so it is found at call time.
        from diptych.common_config.accessors import get_context

        return get_context().scoped(self, leaves)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise SealedBagError(
            f"the published bag {type(self).__name__} is sealed: {name!r} can't be assigned; use "
            f"get_context().override(source, {name}=…) for good or `with bag.override({name}=…)` for a while"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise SealedBagError(f"the published bag {type(self).__name__} is sealed: {name!r} can't be deleted")
