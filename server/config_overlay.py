"""What the control plane changed for this engine alone: shown in the readback, never written to the bags,
which another engine in the same process shares."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, cast

from diptych.common_config import readback

logger = logging.getLogger(__name__)


class ConfigOverlay:
    def __init__(self) -> None:
        self._values: dict[str, object] = {}
        self._log: list[dict[str, object]] = []

    def record_config_updates(self, source: str, /, **values: object) -> None:
        """`source` changed these for this engine: leaves, or facts of its own (weight version)."""
        for name, value in values.items():
            self._log.append({"source": source, "name": name, "value": value})
            logger.info("%s sets %s = %r for this engine", source, name, value)
        self._values.update(values)

    def config_value(self, name: str) -> object:
        """The value in effect for this engine. Raises `KeyError` for a name nobody declared or recorded."""
        return self.resolved_config_dict()[name]

    def resolved_config_dict(self) -> Mapping[str, object]:
        """Every leaf by name as in effect for this engine, secrets hidden."""
        bags = cast("dict[str, dict[str, object]]", readback()["bags"])
        return {**dict(_leaves(bags)), **self._values}

    def readback(self) -> dict[str, Any]:
        """What was recorded, and by whom."""
        return {"values": dict(self._values), "updates": [dict(entry) for entry in self._log]}


def _leaves(bags: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in bags.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield name, value
