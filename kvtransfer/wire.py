"""Control messages between the schedulers of a prefill and a decode worker.

A message is two ZMQ frames: `b"DPTC" + version` and the msgpack of an `Envelope`. The version is read
before anything is decoded, sizes are checked before that, and nothing is ever unpickled. Whatever does not
decode is counted and dropped by the receiver; it never raises past `decode`'s `WireError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from diptych.engine.kv_layout import Fingerprint
from diptych.engine.wire import TokenLogprob
from diptych.kvtransfer.backends.interface import Endpoint
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.identity import Identity

PROTOCOL_VERSION = 2
MAX_CONTROL_BYTES = 32 << 20
"""Largest frame either side accepts: a page list or the prompt logprobs of the longest context fit."""

_MAGIC = b"DPTC"
_PREAMBLE = _MAGIC + bytes([PROTOCOL_VERSION])


class WireError(TransferError):
    """Bytes that are no message of ours."""


class VersionMismatch(WireError):
    """A message of ours in another protocol version."""


class AuxBlock(msgspec.Struct, frozen=True, kw_only=True):
    """What decode needs beside the pages to go on without a forward.

    It travels inside the final control message, stamped with its room. There is no aux slot in registered
    memory, hence none that could be stale, leak, or be written after its request was freed.
    """

    room: int
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that prefill took from its prefix cache."""
    first_token: int | None = None
    """The token prefill drew; None when no token was asked for."""
    first_logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per prompt token (the first is None), when asked for."""


class Checksums(msgspec.Struct, frozen=True, kw_only=True):
    """Of what a room delivers, as prefill has it; `checksum.py` says how they are made."""

    pages: list[bytes]
    """One for each page that was written, in the order of the reservation, taken when it was posted."""
    aux: bytes


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Decode → prefill, first contact: who I am and how to reach my slab."""

    number: int
    """Goes up with each hello of this process: what was said about an earlier contact may come late."""
    identity: Identity
    control_address: str
    fingerprint: Fingerprint
    endpoint: Endpoint


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Prefill → decode: your `Hello` is accepted and your slab is connected."""

    hello: int
    """The number of that `Hello`."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Answer, over the connection it came by, to a message that could not be accepted. Or, with `hello` and
    over prefill's own link: the contact that this `Hello` began is lost."""

    reason: str
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 502
    """HTTP status for the clients whose rooms this fails; 503 where trying again can help."""
    instance_id: str
    """Who answers; differs from the envelope's target when the addressee has been replaced."""
    hello: int | None = None


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Decode → prefill: write the room's pages `first_page_index ..` onto these pages of my slab."""

    room: int
    lease: int
    pages: list[int]
    num_prompt_tokens: int
    first_page_index: int = 0
    checksum: bool = False
    """`Complete` must carry checksums, and will be answered: `Verified` or `Abort`."""


class Complete(msgspec.Struct, frozen=True, kw_only=True, tag="complete"):
    """Prefill → decode: every write of the room is in your memory."""

    room: int
    lease: int
    num_pages: int
    """Distinct reserved pages that were written."""
    aux: AuxBlock
    checksums: Checksums | None = None
    """When the reservation asked for them."""


class Verified(msgspec.Struct, frozen=True, kw_only=True, tag="verified"):
    """Decode → prefill: what `Complete` announced is what arrived. Only where checksums were asked for."""

    room: int
    lease: int


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Either way: the room failed here, for this reason. From decode it also asks for `Drained`, and may be
    repeated until that comes."""

    room: int
    lease: int
    """0 from a prefill that never saw a `Reserve`."""
    reason: str
    status: Annotated[int, msgspec.Meta(ge=400, le=599)]
    """HTTP status for the client."""


class RoomDrained(msgspec.Struct, frozen=True, kw_only=True, tag="drained"):
    """Prefill → decode: no write of this lease is in flight and none will be posted."""

    room: int
    lease: int
    clean: bool
    """False when a write ended in error: bytes may still sit in a socket buffer for a moment."""


ControlMessage = Hello | Welcome | Refused | Reserve | Complete | Verified | Abort | RoomDrained


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    """The sender's instance id."""
    target: str
    """The addressee's instance id; a process started later on the same address must not act on it."""
    body: ControlMessage


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)


def encode(source: str, target: str, body: ControlMessage) -> list[bytes]:
    """The frames to send. Raises `WireError` when the message is over `MAX_CONTROL_BYTES`."""
    payload = _encoder.encode(Envelope(source=source, target=target, body=body))
    if len(payload) > MAX_CONTROL_BYTES:
        raise WireError(
            f"a {type(body).__name__} message of {len(payload)} bytes is over the limit, {MAX_CONTROL_BYTES}"
        )
    return [_PREAMBLE, payload]


def decode(frames: Sequence[bytes]) -> Envelope:
    """Raises `VersionMismatch` or `WireError`, each with a readable reason."""
    if len(frames) != 2:
        raise WireError(f"{len(frames)} frames instead of 2")
    preamble, payload = frames
    if len(preamble) != len(_PREAMBLE) or not preamble.startswith(_MAGIC):
        raise WireError("not a control message")
    if preamble != _PREAMBLE:
        raise VersionMismatch(
            f"transfer protocol version {preamble[-1]} at the peer, version {PROTOCOL_VERSION} here"
        )
    if len(payload) > MAX_CONTROL_BYTES:
        raise WireError(f"{len(payload)} bytes are over the limit of {MAX_CONTROL_BYTES}")
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"undecodable control message: {error}") from error
