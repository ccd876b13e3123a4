"""Refusing by name what can't be honoured, rather than answering something else."""

from __future__ import annotations

import msgspec

from diptych.server.errors import BadRequest
from diptych.server.requests import UNSUPPORTED


class _Probe(msgspec.Struct):
    sampling_params: object = None


_Fields = msgspec.defstruct(
    "_Fields", [(name, object, accepted[0]) for name, accepted in UNSUPPORTED.items()], bases=(_Probe,)
)


def refuse_unsupported(body: bytes) -> None:
    """`body` is valid JSON. Raises `BadRequest` for the first field that asks for something we lack."""
    fields = msgspec.json.decode(body, type=_Fields)
    given = msgspec.structs.asdict(fields)
    inside = given.pop("sampling_params")
    _refuse(given, "")
    for params in inside if isinstance(inside, list) else [inside]:
        if isinstance(params, dict):
            _refuse(params, "sampling_params.")


def _refuse(fields: dict[str, object], prefix: str) -> None:
    for name, accepted in UNSUPPORTED.items():
        if name in fields and fields[name] not in accepted:
            raise BadRequest(f"`{prefix}{name}` is not supported", param=prefix + name)
