"""One client request to a generating route, parsed only as far as the router needs it."""

from __future__ import annotations

import dataclasses
import functools
import time

import msgspec

from diptych.httpserver.json_fault import json_fault
from diptych.router.errors import RouterError

# Values stay the raw bytes the client sent: numbers keep their digits, unknown fields survive, and a long
# token-id prompt isn't decoded and encoded again for nothing.
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclasses.dataclass(frozen=True)
class Call:
    """What both legs are sent (but for the bootstrap fields) and what a policy may look at."""

    path: str
    """The route, e.g. `/v1/completions`."""
    fields: dict[str, msgspec.Raw]
    headers: dict[str, str]
    """For the workers: content type, authorization, request id, trace context."""
    request_id: str
    received: float = dataclasses.field(default_factory=time.monotonic)
    """`time.monotonic()` when the request arrived."""

    @functools.cached_property
    def model(self) -> str | None:
        """The model that is asked for; None if none is, or not by a string."""
        return _text(self.fields.get("model"))

    def body(self, host: str, port: int | None, room: int) -> bytes:
        """The JSON body for one attempt. A worker derives one room per sample from the scalar `room`."""
        bootstrap = {
            "bootstrap_host": msgspec.Raw(msgspec.json.encode(host)),
            "bootstrap_port": msgspec.Raw(msgspec.json.encode(port)),
            "bootstrap_room": msgspec.Raw(msgspec.json.encode(room)),
        }
        return msgspec.json.encode({**self.fields, **bootstrap})


def _text(raw: msgspec.Raw | None) -> str | None:
    try:
        value = None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def asked_model(body: bytes) -> str | None:
    """The `model` of a JSON object; None if there is none to be found, whatever else the body is."""
    try:
        return _text(parse_fields(body).get("model"))
    except RouterError:
        return None


def parse_fields(raw: bytes) -> dict[str, msgspec.Raw]:
    """The top-level fields of a JSON object; raises RouterError (400) for anything else."""
    try:
        raw.decode()
        return _object_decoder.decode(raw)
    except UnicodeDecodeError as error:
        raise RouterError(400, f"the body is not valid UTF-8 (byte {error.start})") from None
    except msgspec.ValidationError as error:
        raise RouterError(400, str(error)) from None
    except msgspec.DecodeError as error:
        raise RouterError(400, f"the body {json_fault(raw, error)}") from None
    except RecursionError:
        raise RouterError(400, "the body is nested too deeply") from None
