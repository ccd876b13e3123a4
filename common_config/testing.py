"""For tests: publish a real record, and take it away again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diptych.common_config.accessors import current, install, publish
from diptych.common_config.programs import Program, Role
from diptych.common_config.record import LaunchConfig
from diptych.common_config.resolution import resolve


def reset_for_tests() -> None:
    """Forget what this process published."""
    install(None)


@contextmanager
def override_config(*, role: Role = Role.LOCAL, **fields: object) -> Iterator[LaunchConfig]:
    """Publish a record of `launch-local`, which has every namespace, with these fields set as if by flags
    (the environment is left out). The publication of before, or none, is back when the block ends."""
    before = current()
    record = resolve(Program.LOCAL, flags=fields, env={})
    install(None)
    try:
        publish(record, role=role)
        yield record
    finally:
        install(before)
