"""Refusing by name what can't be honoured, rather than answering something else."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from diptych.server.errors import BadRequest
from diptych.server.requests import UNSUPPORTED


class _Probe(msgspec.Struct):
    sampling_params: object = None


class Unsupported:
    """Fields that a route can't honour, with the values that ask for nothing."""

    def __init__(
        self, accepted: Mapping[str, tuple[object, ...]], instead: Mapping[str, str] | None = None
    ) -> None:
        """`instead`: what the client may have meant, for fields that have another name on this route."""
        self._accepted = {**accepted, **dict.fromkeys(instead or {}, (None,))}
        self._instead = instead or {}
        self._fields = msgspec.defstruct(
            "_Fields", [(name, object, None) for name in self._accepted], bases=(_Probe,)
        )

    @property
    def names(self) -> Set[str]:
        return self._accepted.keys()

    def refuse(self, body: bytes) -> None:
        """`body` is valid JSON. Raises `BadRequest` for the first field that asks for something we lack."""
        given = msgspec.structs.asdict(msgspec.json.decode(body, type=self._fields))
        inside = given.pop("sampling_params")
        self._refuse(given, "")
        for params in inside if isinstance(inside, list) else [inside]:
            if isinstance(params, dict):
                self._refuse(params, "sampling_params.")

    def _refuse(self, fields: Mapping[str, object], prefix: str) -> None:
        for name, accepted in self._accepted.items():
            value = fields.get(name)
            if value is not None and value not in accepted:
                other = self._instead.get(name)
                hint = f"; {prefix}{other} takes its place on this route" if other else ""
                raise BadRequest(f"`{prefix}{name}` is not supported{hint}", param=prefix + name)


refuse_unsupported = Unsupported(UNSUPPORTED).refuse
"""For the fields that no generating route takes."""
