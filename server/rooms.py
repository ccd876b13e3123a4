"""One room per sample.

A router may send fewer rooms than the request has samples (the released `sglang-router` sends two for two
prompts with `n=2`). The missing ones are computed from what came, by a pure function that both workers of
a pair evaluate alike:

- samples are numbered prompt by prompt: sample `s` of prompt `p` is number `p * n + s`;
- with R rooms for S samples (R divides S; a scalar is R = 1), sample `i` belongs to room
  `rooms[i // (S / R)]` and is number `k = i % (S / R)` within it;
- `derive_room(room, 0)` is the room itself, so one room per sample is used as it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.server.errors import BadRequest

ROOM_BITS = 63
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Pairing:
    """Where one sample meets its other half."""

    room: int
    host: str | None
    port: int | None


def derive_room(room: int, index: int) -> int:
    """The room of the `index`-th sample that shares `room`: SplitMix64 (Steele, Lea, Flood: Fast Splittable
    Pseudorandom Number Generators, 2014) seeded with the room, its `index`-th output, top bit cleared."""
    if index == 0:
        return room
    z = (room + index * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) & ((1 << ROOM_BITS) - 1)


def sample_rooms(rooms: int | Sequence[int], samples: int) -> list[int]:
    """The room of every sample. Raises `BadRequest` (param `bootstrap_room`)."""
    given = [rooms] if isinstance(rooms, int) else list(rooms)
    for room in given:
        if not 0 <= room < 1 << ROOM_BITS:
            raise BadRequest(
                f"bootstrap_room must be between 0 and 2**{ROOM_BITS} - 1, got {room}", param="bootstrap_room"
            )
    if len(set(given)) != len(given):
        raise BadRequest("bootstrap_room names a room twice", param="bootstrap_room")
    if not given or samples % len(given):
        raise BadRequest(
            f"{len(given)} rooms can't be shared out over {samples} samples", param="bootstrap_room"
        )
    share = samples // len(given)
    derived = [derive_room(given[i // share], i % share) for i in range(samples)]
    if len(set(derived)) != samples:
        raise BadRequest(
            "the rooms derived for the samples collide; send other rooms", param="bootstrap_room"
        )
    return derived


def pair_samples(
    rooms: int | Sequence[int],
    hosts: str | Sequence[str | None] | None,
    ports: int | Sequence[int | None] | None,
    samples: int,
    *,
    default_port: int,
) -> list[Pairing]:
    """Rooms, hosts and ports of every sample; hosts and ports may be scalars or lists whose length divides
    the number of samples. Raises `BadRequest` naming the field."""
    host_of = _spread(hosts, samples, "bootstrap_host")
    port_of = _spread(ports, samples, "bootstrap_port")
    pairings = []
    for room, host, port in zip(sample_rooms(rooms, samples), host_of, port_of, strict=True):
        if host is not None and not host:
            raise BadRequest("bootstrap_host is empty", param="bootstrap_host")
        if port is not None and not 0 < port < 65536:
            raise BadRequest(f"bootstrap_port must be a port, got {port}", param="bootstrap_port")
        pairings.append(Pairing(room=room, host=host, port=default_port if port is None else port))
    return pairings


def _spread(
    given: str | int | Sequence[str | None] | Sequence[int | None] | None, samples: int, param: str
) -> list:  # type: ignore[type-arg]
    if given is None or isinstance(given, str | int):
        return [given] * samples
    if not given or samples % len(given):
        raise BadRequest(f"{param} has {len(given)} entries for {samples} samples", param=param)
    share = samples // len(given)
    return [given[i // share] for i in range(samples)]
