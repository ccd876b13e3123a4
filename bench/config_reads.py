"""What reading a setting costs, beside a plain attribute of a plain object.

    python -m diptych.bench.config_reads

Exit code 1 if a leaf costs over 3 times a plain attribute read. `get_schedule()` is a function call on top of
it, shown apart: a loop that reads many times may hold the bag, the same object until the next publish.
"""

from __future__ import annotations

import sys
import timeit

from diptych.common_config import Program, Role, get_schedule, publish, resolve

LIMIT = 3.0
UNROLLED = 100
"""Reads in one turn of the timed loop, so that the loop costs next to nothing."""
TURNS = 5_000
REPEATS = 15


class Plain:
    def __init__(self) -> None:
        self.page_size = 16


def measure(read: str) -> float:
    """Nanoseconds that an expression takes: the fastest of several tries, the rest is the machine's doing."""
    names = {"plain": Plain(), "bag": get_schedule()}
    setup = "from diptych.common_config import get_schedule\nheld_plain, held_bag = plain, bag"
    tries = timeit.repeat("; ".join([read] * UNROLLED), setup, number=TURNS, repeat=REPEATS, globals=names)
    return min(tries) / (UNROLLED * TURNS) * 1e9


def main() -> int:
    record = resolve(Program.COLOCATED, flags={"model_path": "none"}, env={})
    publish(record, role=Role.COLOCATED_SCHEDULER)
    attribute = measure("held_plain.page_size")
    leaf = measure("held_bag.page_size")
    accessor = measure("get_schedule().page_size")
    call = measure("get_schedule()")
    print(f"plain attribute                {attribute:6.2f} ns")
    print(f"leaf of a bag                  {leaf:6.2f} ns  ({leaf / attribute:.2f} times; limit {LIMIT:g})")
    print(f"get_schedule()                 {call:6.2f} ns")
    print(f"get_schedule() and its leaf    {accessor:6.2f} ns")
    return int(leaf > LIMIT * attribute)


if __name__ == "__main__":
    sys.exit(main())
