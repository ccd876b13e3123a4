"""Which namespaces each role may read, and the three modes of `DIPTYCH_ROLE_NAMESPACES`.

The sets are filled from recorded runs: run the end-to-end tests with `DIPTYCH_ROLE_NAMESPACES=record` and
`DIPTYCH_ROLE_NAMESPACES_FILE=FILE`, then `python -m diptych.common_config.role_sets FILE` prints them. A role
without a recorded run (its set is None) may read every namespace of its program.
"""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from diptych.common_config.errors import ConfigError
from diptych.common_config.programs import Role
from diptych.common_config.record import did_you_mean

MODE_VARIABLE = "DIPTYCH_ROLE_NAMESPACES"
FILE_VARIABLE = "DIPTYCH_ROLE_NAMESPACES_FILE"

_FRONTEND = frozenset({"model", "observability", "parallel", "serving"})
_SCHEDULER = frozenset({"device", "exec", "memory", "model", "observability", "schedule", "spec"})

ROLE_SETS: dict[Role, frozenset[str] | None] = {
    Role.PREFILL_FRONTEND: _FRONTEND | {"disagg"},
    Role.PREFILL_SCHEDULER: _SCHEDULER | {"disagg", "parallel"},
    Role.DECODE_FRONTEND: _FRONTEND | {"disagg"},
    Role.DECODE_SCHEDULER: _SCHEDULER | {"disagg", "parallel"},
    Role.COLOCATED_FRONTEND: _FRONTEND,
    Role.COLOCATED_SCHEDULER: _SCHEDULER,
    Role.ROUTER: frozenset({"observability", "router", "serving"}),
    Role.LOCAL: frozenset({"disagg", "model", "serving"}),
}


class Mode(enum.Enum):
    OFF = "off"
    RECORD = "record"
    ENFORCE = "enforce"


def read_mode(env: Mapping[str, str]) -> tuple[Mode, Path | None]:
    """The mode and, for `record`, the file. Raises `ConfigError` on a typo or a missing file."""
    text = env.get(MODE_VARIABLE, "off")
    modes = [mode.value for mode in Mode]
    if text not in modes:
        raise ConfigError(
            [f"{MODE_VARIABLE}={text!r} is not one of {', '.join(modes)}{did_you_mean(text, modes)}"]
        )
    mode = Mode(text)
    if mode is not Mode.RECORD:
        return mode, None
    if not env.get(FILE_VARIABLE):
        raise ConfigError([f"{MODE_VARIABLE}=record needs {FILE_VARIABLE}, the file to append to"])
    return mode, Path(env[FILE_VARIABLE])


def mode_problems(env: Mapping[str, str]) -> list[str]:
    """What `publish` would stumble over, found before anything slow is done."""
    try:
        _, path = read_mode(env)
        if path is not None:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644))
    except ConfigError as error:
        return list(error.problems)
    except OSError as error:
        return [f"{FILE_VARIABLE}={env[FILE_VARIABLE]}: can't be written: {error.strerror}"]
    return []


def append(path: Path, role: Role, namespace: str | None) -> None:
    """Write one (role, namespace) pair at once, in one append: workers are torn down without exit handlers.
    None records that the role was published, so that a role which reads nothing is recorded as such."""
    line = json.dumps({"role": role.value, "namespace": namespace}) + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def collect(path: Path) -> dict[Role, frozenset[str]]:
    """The sets that a record file holds; a role that read nothing has an empty one."""
    sets: dict[Role, set[str]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        namespaces = sets.setdefault(Role(entry["role"]), set())
        if entry["namespace"] is not None:
            namespaces.add(entry["namespace"])
    return {role: frozenset(sets[role]) for role in Role if role in sets}


def main() -> None:
    for role, namespaces in collect(Path(sys.argv[1])).items():
        print(f"{role.value}: {', '.join(sorted(namespaces)) or 'nothing'}")


if __name__ == "__main__":
    main()
