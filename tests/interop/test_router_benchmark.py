"""`bench/router.py` drives both routers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from diptych.bench.router import DIRECT, PEER, SHORT_USERS, Result, main

from .conftest import ClientEnvironment


def test_both_routers_are_measured_beside_the_direct_way(clients: ClientEnvironment, tmp_path: Path) -> None:
    assert clients.bin / "python" == PEER
    report = tmp_path / "report.json"
    assert main(["--streams", "2", "--requests", "64", "--rounds", "2", "--json", str(report)]) == 0
    results = msgspec.json.decode(report.read_bytes(), type=list[Result])
    assert [(result.load.users, result.way) for result in results] == [
        (users, way) for users in (SHORT_USERS, 2) for way in (DIRECT, "launch-router", "sglang-router")
    ]
    for result in results:
        assert (result.requests, result.failed) == (64, 0)
        assert 0 < result.first_p50 <= result.first_p99
        assert (result.piece_p50 is not None) == result.load.stream
        # The kernel counts in steps of 10 ms, which is what a fast router needs for all of these.
        assert result.cpu_per_request >= 0 if result.way != DIRECT else result.cpu_per_request == 0
    assert any(result.cpu_per_request > 0 for result in results)
