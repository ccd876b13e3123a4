"""What a row is: one field, with values that must be honoured and values that must be refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """Must be refused with this status by an error that names the row's field."""

    fields: Fields
    status: int = 400
    param: str | None = None
    """What the error names instead, or begins with."""


Rows = Mapping[str, Sequence[Fields | Refused]]


def no(fields: Fields, status: int = 400, param: str | None = None) -> Refused:
    return Refused(fields, status, param)
