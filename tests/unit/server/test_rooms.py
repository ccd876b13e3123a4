from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.server.errors import BadRequest
from diptych.server.rooms import Pairing, derive_room, pair_samples, sample_rooms

ROOMS = st.integers(min_value=0, max_value=2**63 - 1)


def test_a_single_sample_uses_the_room_itself():
    assert sample_rooms(77, 1) == [77]
    assert sample_rooms([77], 1) == [77]


def test_one_room_per_sample_is_used_as_it_came():
    assert sample_rooms([5, 9, 3], 3) == [5, 9, 3]


def test_missing_rooms_are_derived_within_their_prompt():
    rooms = sample_rooms([100, 200], 4)
    assert rooms == [100, derive_room(100, 1), 200, derive_room(200, 1)]


def test_derivation_is_splitmix64():
    # Reference outputs of SplitMix64 for seed 1234567: the derived room is its output without the top bit.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [derive_room(1234567, k) for k in (1, 2, 3)] == [value & (2**63 - 1) for value in known]


@given(ROOMS, st.integers(min_value=1, max_value=64))
def test_derived_rooms_are_distinct_rooms(room: int, samples: int):
    rooms = sample_rooms(room, samples)
    assert len(set(rooms)) == samples
    assert all(0 <= value < 2**63 for value in rooms)


@pytest.mark.parametrize(
    ("rooms", "samples"),
    [([1, 1], 2), ([1, 2], 3), ([1, 2, 3], 2), ([], 1), (-1, 1), (2**63, 1), ([1, -5], 2)],
)
def test_rooms_that_cannot_be_shared_out_are_refused(rooms: int | list[int], samples: int):
    with pytest.raises(BadRequest) as refused:
        sample_rooms(rooms, samples)
    assert refused.value.param == "bootstrap_room"


def test_hosts_and_ports_spread_like_rooms():
    pairings = pair_samples([1, 2], ["a", "b"], [None, 7], 4, default_port=8998)
    assert [(p.host, p.port) for p in pairings] == [("a", 8998), ("a", 8998), ("b", 7), ("b", 7)]
    assert pair_samples(1, "a", None, 1, default_port=5) == [Pairing(1, "a", 5)]


@pytest.mark.parametrize(
    ("hosts", "ports", "param"),
    [
        (["a", "b", "c"], None, "bootstrap_host"),
        ("", None, "bootstrap_host"),
        ("a", 0, "bootstrap_port"),
        ("a", 70000, "bootstrap_port"),
        ("a", [1, 2, 3], "bootstrap_port"),
    ],
)
def test_bad_hosts_and_ports_are_named(hosts, ports, param: str):
    with pytest.raises(BadRequest) as refused:
        pair_samples([1, 2], hosts, ports, 2, default_port=1)
    assert refused.value.param == param
