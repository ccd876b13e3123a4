"""Steps that fault injection holds: the state lasts, the loop goes on, and the release changes nothing."""

from __future__ import annotations

import pytest
from unit.schedulers.cell import Cell, DecodeSide, PrefillSide, Side, prompt

from diptych.decode.request import DecodeRequest, DecodeState
from diptych.engine.faults import FaultChange, FaultRule, Gate
from diptych.engine.wire import Abort
from diptych.prefill.request import PrefillRequest, PrefillState

LENGTH = 40  # three chunks


def hold(side: Side, gate: Gate, skip: int = 0) -> None:
    side.faults.change(FaultChange(rules=[FaultRule(where=gate, action="hold", skip=skip)]))


def release(side: Side) -> None:
    side.faults.change(FaultChange(rules=[], release=True))


def phase(side: Side, rid: str) -> PrefillState | DecodeState:
    request = side.scheduler.requests[rid]
    assert isinstance(request, PrefillRequest | DecodeRequest)
    return request.phase


HELD: list[tuple[str, Gate, int, PrefillState | DecodeState]] = [
    ("prefill", "admit", 0, PrefillState.WAITING),
    ("prefill", "compute", 0, PrefillState.FORWARDING),
    ("prefill", "compute", 2, PrefillState.FORWARDING),
    ("decode", "preallocate", 0, DecodeState.PREALLOCATING),
    ("decode", "compute", 2, DecodeState.RUNNING),
]


@pytest.fixture
def sides(cell: Cell) -> dict[str, PrefillSide | DecodeSide]:
    prefill, decode = cell.prefill(optimistic=0), cell.decode()
    cell.introduce(prefill, decode)
    return {"prefill": prefill, "decode": decode}


@pytest.mark.parametrize("end", ["release", "abort"])
@pytest.mark.parametrize(("at", "gate", "skip", "state"), HELD)
def test_a_held_step_keeps_the_state_until_the_release_or_an_abort(
    cell: Cell,
    sides: dict[str, PrefillSide | DecodeSide],
    at: str,
    gate: Gate,
    skip: int,
    state: PrefillState | DecodeState,
    end: str,
) -> None:
    held = sides[at]
    hold(held, gate, skip)
    rid = cell.request(prompt(LENGTH), *sides.values(), of=sides["prefill"])  # type: ignore[arg-type]
    cell.until(lambda: bool(held.faults.report().held))
    cell.settle()
    assert phase(held, rid) is state
    computed = held.scheduler.requests[rid].num_computed
    assert computed == {"compute": (skip * 16 if at == "prefill" else LENGTH + skip), "admit": 0}.get(gate, 0)
    if end == "release":
        release(held)
        cell.until(lambda: sides["decode"].samples[rid].finish is not None)
        assert sides["decode"].samples[rid].tokens == cell.answer(prompt(LENGTH))
    else:
        for side in sides.values():
            side.send(Abort(rid=rid))
        cell.until(lambda: all(rid not in side.scheduler.requests for side in sides.values()))
        release(held)
    cell.settle()
    assert all(side.at_baseline() for side in sides.values())


def test_a_parked_request_stays_parked_while_resuming_is_held(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode(pages=8)
    cell.introduce(prefill, decode)
    hold(decode, "resume")
    rids = [cell.request(prompt(7, i), prefill, decode, of=prefill, tokens=20) for i in (1, 2)]
    cell.until(lambda: any(decode.samples[rid].finish for rid in rids))
    cell.settle()
    (parked,) = [rid for rid in rids if decode.samples[rid].finish is None]
    assert phase(decode, parked) is DecodeState.RETRACTED
    release(decode)
    cell.until(lambda: decode.samples[parked].finish is not None)
    assert decode.samples[parked].tokens == cell.answer(prompt(7, rids.index(parked) + 1), 20)


def test_a_delayed_step_is_taken_when_its_time_has_come(
    cell: Cell, sides: dict[str, PrefillSide | DecodeSide]
) -> None:
    decode = sides["decode"]
    rule = FaultRule(where="compute", action="delay", seconds=0.1, count=1)
    decode.faults.change(FaultChange(rules=[rule]))
    rid = cell.request(prompt(LENGTH), *sides.values(), of=sides["prefill"])  # type: ignore[arg-type]
    cell.until(lambda: bool(decode.faults.report().held))
    deadline = decode.faults.next_deadline()
    assert deadline is not None

    def over() -> bool:
        decode.faults.run_due()  # what the faulty control plane does at each step
        return decode.samples[rid].finish is not None

    cell.until(over)
    assert decode.faults.clock() > deadline
