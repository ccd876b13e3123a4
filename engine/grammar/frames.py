"""What a scheduler and its compiler process write to each other: a length, then msgpack."""

from __future__ import annotations

import struct
from typing import Protocol, TypeVar

import msgspec

from diptych.engine.grammar.vocabulary import Text
from diptych.engine.wire import Grammar

T = TypeVar("T")

_LENGTH = struct.Struct("<Q")


class CompilerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """First, and once."""

    model_dir: str
    vocab_size: int
    end_ids: list[int]
    any_whitespace: bool
    """Between the elements of JSON: as much as the model likes."""


class CompileJob(msgspec.Struct, frozen=True, kw_only=True):
    grammar: Grammar
    text: Text
    timeout: float
    """Seconds of processor time, after which the job's process ends itself."""
    niceness: int


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    text: str
    """As xgrammar serialises a compiled grammar."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    message: str


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """The library can't be loaded, so no grammar can be compiled."""

    message: str


SETUPS = msgspec.msgpack.Decoder(CompilerSetup)
JOBS = msgspec.msgpack.Decoder(CompileJob)
REPLIES: msgspec.msgpack.Decoder[Compiled | Refused | Unusable] = msgspec.msgpack.Decoder(
    Compiled | Refused | Unusable
)


class Reads(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


class Writes(Protocol):
    def write(self, data: bytes, /) -> int: ...
    def flush(self) -> None: ...


def write_frame(pipe: Writes, message: msgspec.Struct) -> None:
    """Raises OSError when the other end is gone."""
    data = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def read_frame(pipe: Reads, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """None when the other end is gone. Of an unbuffered pipe nothing beyond the frame is read."""
    header = _read(pipe, _LENGTH.size)
    if header is None:
        return None
    (length,) = _LENGTH.unpack(header)
    data = _read(pipe, length)
    return None if data is None else decoder.decode(data)


def _read(pipe: Reads, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = pipe.read(size)
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
