"""What the control plane changed for this engine alone: shown in the readback, never written to the bags,
which another engine in the same process shares."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any, cast

from diptych.common_config import BadValue, check_value, effective_value, hide_secret, readback
from diptych.server.errors import BadRequest

logger = logging.getLogger(__name__)

LOG_LENGTH = 100
"""Updates that the readback shows: a weight version may change with every training step, for weeks."""


def check_setting(name: str, value: object, *, hint: str = "") -> None:
    """Raises `BadRequest` unless `value` could have been launched with as `name`; `hint` ends the message."""
    try:
        check_value(name, value)
    except BadValue as error:
        raise BadRequest(f"`{name}`: {error}{hint}", param=name) from None


class ConfigOverlay:
    def __init__(self) -> None:
        self._values: dict[str, object] = {}
        self._log: deque[dict[str, object]] = deque(maxlen=LOG_LENGTH)

    def record_config_updates(self, source: str, /, **values: object) -> None:
        """`source` changed these for this engine: leaves, or facts of its own (an attached cache tier)."""
        for name, value in values.items():
            shown = hide_secret(name, value)
            self._log.append({"source": source, "name": name, "value": shown})
            logger.info("%s sets %s = %r for this engine", source, name, shown)
            self._values[name] = shown

    def withdraw_config_updates(self, source: str, /, *names: str) -> None:
        """`source` undid these (a cache tier is detached): what the process published shows again. Raises
        `KeyError` for a name that isn't recorded, before anything changes."""
        for name in names:
            self._values[name]
        for name in names:
            del self._values[name]
            self._log.append({"source": source, "name": name, "withdrawn": True})
            logger.info("%s withdraws %s for this engine", source, name)

    def config_value(self, name: str) -> object:
        """The value in effect for this engine. Raises `KeyError` for a name nobody declared or recorded."""
        return self._values[name] if name in self._values else self.launch_value(name)

    def launch_value(self, name: str) -> object:
        """What a withdrawal brings back: the process's value. Raises `KeyError` for an undeclared name."""
        return effective_value(name)

    def recorded(self) -> Set[str]:
        """The names that hold an update now."""
        return self._values.keys()

    def resolved_config_dict(self) -> Mapping[str, object]:
        """Every leaf by name as in effect for this engine, secrets hidden."""
        bags = cast("dict[str, dict[str, object]]", readback()["bags"])
        return {**dict(_leaves(bags)), **self._values}

    def readback(self) -> dict[str, Any]:
        """What was recorded, and by whom: the last `LOG_LENGTH` updates, oldest first."""
        return {"values": dict(self._values), "updates": [dict(entry) for entry in self._log]}


def _leaves(bags: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in bags.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield name, value
