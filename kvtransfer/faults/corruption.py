"""Control messages turned into bytes that are none. Never into another valid message: what TCP's checksum and
ours let through unseen is not what a peer can be asked to survive."""

from __future__ import annotations

from random import Random

from diptych.engine.faults import Corruption
from diptych.kvtransfer import wire


def corrupt(frames: list[bytes], how: Corruption | None, random: Random) -> list[bytes]:
    """`frames`: what `wire.encode` made. The result makes `wire.decode` raise, or is over the size that a
    socket accepts."""
    preamble, payload = frames
    match how or random.choice(("noise", "truncate", "version")):
        case "noise":
            # 0xc1 is the one byte that begins nothing in msgpack.
            return [preamble, b"\xc1" + random.randbytes(len(payload) - 1)]
        case "truncate":
            return [preamble, payload[: random.randrange(len(payload))]]
        case "version":
            return [preamble[:-1] + bytes([preamble[-1] ^ 0xFF]), payload]
        case "oversize":
            return [preamble, payload + bytes(wire.MAX_CONTROL_BYTES)]
        case other:
            raise AssertionError(other)
