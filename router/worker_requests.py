"""The bodies that `/workers` takes, and their checks. The names of fields are those of existing PD routers
where there are any."""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from diptych.common_config import parse_worker_url
from diptych.router.errors import RouterError
from diptych.router.workers import WorkerRole

MAX_PORT = 65535
MAX_LEASE = 86400.0
MAX_LABELS = 64
MAX_TEXT = 256

# For the OpenAPI document alone: what msgspec checked would be refused in its words.
_Port = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": MAX_PORT})]
_Lease = Annotated[float, Meta(extra_json_schema={"minimum": 1, "maximum": MAX_LEASE})]
_Text = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_TEXT})]
_Label = Annotated[str, Meta(extra_json_schema={"maxLength": MAX_TEXT})]
_Labels = Annotated[
    dict[_Label, _Label],
    Meta(extra_json_schema={"maxProperties": MAX_LABELS, "propertyNames": {"maxLength": MAX_TEXT}}),
]
_Role = Annotated[str, Meta(extra_json_schema={"enum": [role.value for role in WorkerRole]})]


class WorkerChanges(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What may be changed of a worker; also part of what it is added with."""

    bootstrap_port: _Port | UnsetType | None = UNSET
    """None: it has no bootstrap service."""
    labels: _Labels | UnsetType = UNSET
    lease: _Lease | UnsetType | None = UNSET
    """Seconds; None: it stays until it is removed."""


class NewWorker(WorkerChanges, kw_only=True, forbid_unknown_fields=True):
    """A worker to add, or whose lease to renew."""

    url: str
    role: _Role | None = None
    worker_type: _Role | None = None
    """Another name of `role`."""
    model_id: _Text | None = None
    """What it serves, until it says so itself."""
    instance_id: _Text | None = None
    """Given by a worker that registers itself: drawn anew by each process."""


T = TypeVar("T", bound=WorkerChanges)

_FIELD = re.compile(r"field `(?P<own>\w+)`|`\$\.(?P<at>\w+)")
"""The field in a msgspec message."""


def decode(body: bytes, kind: type[T]) -> T:
    """Raises RouterError (400) naming the field, also for a value out of its bounds."""
    try:
        asked = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        named = _FIELD.search(str(error))
        raise RouterError(400, str(error), param=named and (named["own"] or named["at"])) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RouterError(400, f"the body is not a JSON object: {error}") from None
    _check(asked)
    return asked


def worker_url(text: str) -> str:
    try:
        return parse_worker_url((text,))
    except ValueError as error:
        raise RouterError(400, str(error), param="url") from None


def role_of(asked: NewWorker) -> WorkerRole | None:
    given = {name for name in (asked.role, asked.worker_type) if name is not None}
    if not given:
        return None
    if len(given) > 1 or not given <= set(WorkerRole):
        shown = " and ".join(sorted(given))
        raise RouterError(400, f"role is {shown}; this router pairs prefill and decode workers", param="role")
    return WorkerRole(given.pop())


def _check(asked: WorkerChanges) -> None:
    port, lease = asked.bootstrap_port, asked.lease
    if isinstance(port, int) and not 1 <= port <= MAX_PORT:
        raise RouterError(400, f"bootstrap_port {port} is not from 1 to {MAX_PORT}", param="bootstrap_port")
    if isinstance(lease, float) and not 1 <= lease <= MAX_LEASE:
        raise RouterError(400, f"lease {lease:g} is not from 1 to {MAX_LEASE:g} seconds", param="lease")
    if isinstance(asked.labels, dict):
        sizes = [len(text) for pair in asked.labels.items() for text in pair]
        if len(asked.labels) > MAX_LABELS or max(sizes, default=0) > MAX_TEXT:
            raise RouterError(
                400, f"more than {MAX_LABELS} labels, or a text over {MAX_TEXT}", param="labels"
            )
    if isinstance(asked, NewWorker):
        for name, text in (("instance_id", asked.instance_id), ("model_id", asked.model_id)):
            if text is not None and not 0 < len(text) <= MAX_TEXT:
                raise RouterError(400, f"{name} is empty or over {MAX_TEXT} characters", param=name)
