"""The session tables: what may follow what, and that nothing else does."""

from __future__ import annotations

import pytest

from diptych.kvtransfer.errors import IllegalMove
from diptych.kvtransfer.states import RECEIVER_MOVES, SENDER_MOVES, Machine, ReceiverState, SenderState

TABLES = [(SENDER_MOVES, SenderState), (RECEIVER_MOVES, ReceiverState)]


@pytest.mark.parametrize(("moves", "states"), TABLES, ids=["sender", "receiver"])
def test_only_listed_moves_are_taken(moves, states) -> None:
    for start in states:
        for to in states:
            machine = Machine(start, moves)
            if to in moves[start]:
                machine.move(to)
                assert machine.state is to
            else:
                with pytest.raises(IllegalMove, match="is not a legal move"):
                    machine.move(to)
                assert machine.state is start


@pytest.mark.parametrize(("moves", "states"), TABLES, ids=["sender", "receiver"])
def test_every_state_leads_to_an_end_and_every_active_one_can_fail(moves, states) -> None:
    ends = {states.DONE, states.DRAINED}
    for state in states:
        reachable = {state}
        while grown := {n for s in reachable for n in moves[s]} - reachable:
            reachable |= grown
        assert reachable & ends
        assert (not moves[state]) == (state in ends)
        if state not in {*ends, states.FAILED, states.DRAINING}:
            assert states.FAILED in moves[state]
