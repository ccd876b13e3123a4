"""How everything outside this package reads configuration.

An accessor is one attribute load and one test for None, so `get_schedule().page_size` is legal inside
`torch.compile(fullgraph=True)`. Everything slow (not published, outside the role's set, first read of a
recorded role) is behind an empty slot.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from diptych.common_config.context import Context
from diptych.common_config.errors import ConfigError, NotPublishedError, RoleNamespaceError
from diptych.common_config.namespaces import (
    NAMESPACES,
    Device,
    Disagg,
    Exec,
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
from diptych.common_config.programs import Role
from diptych.common_config.record import LaunchConfig
from diptych.common_config.role_sets import FILE_VARIABLE, MODE_VARIABLE, Mode, append, read_mode

logger = logging.getLogger("diptych.config")


class _Published:
    """The bag behind each accessor, None until it may be read; and the publication itself."""

    __slots__ = (*NAMESPACES, "context")
    context: Context | None
    model: Model | None
    schedule: Schedule | None
    memory: Memory | None
    exec: Exec | None
    device: Device | None
    parallel: Parallel | None
    disagg: Disagg | None
    serving: Serving | None
    spec: Spec | None
    observability: Observability | None
    router: Router | None


_published = _Published()


def install(context: Context | None) -> None:
    """Make a publication the current one; None takes it away."""
    _published.context = context
    for name in NAMESPACES:
        open_now = context is not None and context.mode is not Mode.RECORD and name in context.readable
        setattr(_published, name, context.bags[name] if context is not None and open_now else None)


def current() -> Context | None:
    return _published.context


install(None)


def publish(record: LaunchConfig, *, role: Role) -> None:
    """Project the record into this process's bags. Once per process, before anything reads; a second call
    replaces the first, and the overrides that it drops are logged by name. Raises `ConfigError` for a bad
    `DIPTYCH_ROLE_NAMESPACES`, and TypeError for what is not a record or a role."""
    if not isinstance(record, LaunchConfig):
        raise TypeError(f"publish needs a LaunchConfig, not {type(record).__name__}")
    if not isinstance(role, Role):
        raise TypeError(
            f"publish needs a Role, not {role!r}; the roles are {', '.join(str(r) for r in Role)}"
        )
    mode, record_file = read_mode(os.environ)
    context = Context(record, role, mode, record_file)
    if record_file is not None:
        append(record_file, role, None)
    previous = current()
    if previous is not None:
        dropped = previous.overridden()
        logger.warning(
            "configuration published again; overrides dropped: %s", ", ".join(dropped) if dropped else "none"
        )
    install(context)


def get_context() -> Context:
    """The current publication, for `override` and `restamp`. Raises `NotPublishedError` before it."""
    context = _published.context
    if context is None:
        raise NotPublishedError(_unpublished("get_context()"))
    return context


def readback() -> dict[str, Any]:
    """What is in effect in this process, JSON-able, secrets hidden: `bags` (effective values by namespace),
    `overrides` (the log), `scoped_overrides`, and `record` with `provenance` (what was asked at launch)."""
    return get_context().readback()


def effective_value(name: str) -> object:
    """The effective value of one leaf, as `readback` shows it: for code that deals with leaves by name,
    where a decision would read the bag. Raises `KeyError` for a name that isn't declared, and what reading
    the bag would."""
    namespace = namespace_of(name)
    if getattr(_published, namespace) is None:
        _missing(namespace)
    return get_context().effective(name)


def get_model() -> Model:
    return _missing("model") if _published.model is None else _published.model


def get_schedule() -> Schedule:
    return _missing("schedule") if _published.schedule is None else _published.schedule


def get_memory() -> Memory:
    return _missing("memory") if _published.memory is None else _published.memory


def get_exec() -> Exec:
    return _missing("exec") if _published.exec is None else _published.exec


def get_device() -> Device:
    return _missing("device") if _published.device is None else _published.device


def get_parallel() -> Parallel:
    """As configured or restamped: scoped override → stamp → published leaf."""
    return _missing("parallel") if _published.parallel is None else _published.parallel


def get_disagg() -> Disagg:
    return _missing("disagg") if _published.disagg is None else _published.disagg


def get_serving() -> Serving:
    return _missing("serving") if _published.serving is None else _published.serving


def get_spec() -> Spec:
    return _missing("spec") if _published.spec is None else _published.spec


def get_observability() -> Observability:
    return _missing("observability") if _published.observability is None else _published.observability


def get_router() -> Router:
    return _missing("router") if _published.router is None else _published.router


def _missing(namespace: str) -> Any:
    """The slow path: records a first read, or says why there is nothing to read."""
    context = _published.context
    call = f"get_{namespace}()"
    if context is None:
        raise NotPublishedError(_unpublished(call))
    if namespace not in context.program.namespaces:
        raise NotPublishedError(
            f"{call} was called at {_caller()}, but {context.program.value} has no namespace {namespace}; "
            f"it has {', '.join(context.program.namespaces)}"
        )
    if namespace not in context.readable:
        raise RoleNamespaceError(
            f"role {context.role.value} read namespace {namespace} at {_caller()}, outside its set "
            f"({', '.join(sorted(context.readable)) or 'nothing'}). If the read is wrong, pass the value in "
            "or read it in a role that may. If it is right, run the end-to-end tests with "
            f"{MODE_VARIABLE}=record and {FILE_VARIABLE}=FILE, and put the recorded set into "
            "common_config/role_sets.py"
        )
    if context.record_file is None:
        raise ConfigError([f"{call}: {context.mode.value} mode has no record file"])
    append(context.record_file, context.role, namespace)
    bag = context.bags[namespace]
    setattr(_published, namespace, bag)
    return bag


def _unpublished(call: str) -> str:
    return (
        f"{call} was called at {_caller()} before this process published its configuration: call "
        "publish(record, role=Role.…) first thing in the process's entry point (tests: override_config(…))"
    )


def _caller() -> str:
    """`file:line` of the nearest frame outside this package."""
    here = str(Path(__file__).parent)
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
