"""A decode worker with checksums against a prefill worker without the setting, over real NIXL."""

from __future__ import annotations

import time

from .conftest import FAST, Process, Workers, start_room, transfer


def landed(prefill: Process, decode: Process, src: list[int], dst: list[int]) -> None:
    """Until the pages are in decode's slab, of which nobody has told it yet."""
    wanted = prefill.do("pages", pages=src)
    give_up = time.monotonic() + 5
    while decode.do("pages", pages=dst) != wanted:
        assert time.monotonic() < give_up


def test_page_that_arrived_damaged_fails_both_legs_and_the_next_request_is_right(workers: Workers) -> None:
    prefill = workers.start("prefill")
    decode = workers.start("decode", settings={**FAST, "checksum": True})
    prefill.do("fill", pages=list(range(64)), seed=1)
    transfer(prefill, decode, 1, [1, 2, 3], [11, 12, 13])
    start_room(prefill, decode, 2, [20, 21, 22, 23], 60)
    prefill.do("send", room=2, src_pages=[4, 5, 6, 7], first_page_index=0)
    landed(prefill, decode, [4, 5, 6, 7], [20, 21, 22, 23])
    decode.do("damage", page=23)
    prefill.do("finish", room=2, tokens=60)
    failed = decode.wait("Failed", 2)
    assert "page 3 of the prompt's KV arrived damaged" in failed["reason"]
    assert (failed["status"], failed["drained"]) == (502, False)
    assert prefill.wait("Failed", 2)["reason"] == failed["reason"]
    decode.wait("Drained", 2)
    assert 'failures_total{backend="nixl",kind="checksum"} 1.0' in decode.do("metrics")
    transfer(prefill, decode, 2, [8, 9], [20, 23])
    assert decode.do("pages", pages=[20, 23]) == prefill.do("pages", pages=[8, 9])
    assert (prefill.stop(), decode.stop()) == (0, 0)
