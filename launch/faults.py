"""The rules of fault injection as a command line gives them. Light: a frontend checks them before it starts
anything slow."""

from __future__ import annotations

import msgspec

from diptych.engine.faults import FaultChange, FaultRule
from diptych.launch.errors import StartupError


def parse_rules(text: str) -> list[FaultRule]:
    """The value of `--fault-injection-rules`. Raises `StartupError` that names the field at fault."""
    try:
        rules = msgspec.json.decode(text, type=list[FaultRule])
    except msgspec.DecodeError as error:
        raise StartupError(f"--fault-injection-rules: {error}") from None
    problem = FaultChange(rules=rules).problem()
    if problem is not None:
        raise StartupError(f"--fault-injection-rules: {problem[0]}: {problem[1]}")
    return rules
