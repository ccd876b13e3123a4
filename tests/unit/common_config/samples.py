"""Values of every declared leaf, made from its declaration."""

from __future__ import annotations

import pytest

from diptych.common_config import Program
from diptych.common_config.declare import Leaf
from diptych.common_config.namespaces import LEAVES
from diptych.common_config.record import leaves_of
from diptych.common_config.values import parse_text

EVERY_LEAF = [pytest.param(leaf, id=name) for name, leaf in LEAVES.items()]

WORKERS = {"prefill": [["http://127.0.0.1:1", "1"]], "decode": [["http://127.0.0.1:2"]]}


def program_with(leaf: Leaf) -> Program:
    return next(p for p in (Program.PREFILL, Program.ROUTER) if leaf.name in leaves_of(p))


def needed(program: Program) -> dict[str, object]:
    """The flags without which a program doesn't start."""
    if program is Program.ROUTER:
        return dict(WORKERS)
    return {} if program is Program.LOCAL else {"model_path": "a-model"}


def texts(leaf: Leaf) -> list[str]:
    """Three texts of a leaf, each unlike the one before, the first unlike the default."""
    if leaf.kind is bool:
        first = str(not leaf.default).lower()
        return [first, str(leaf.default).lower(), first]
    if leaf.choices:
        # A leaf with a single choice can only show that every layer accepts it.
        first = next((choice for choice in leaf.choices if choice != leaf.default), leaf.default)
        second = next((choice for choice in leaf.choices if choice != first), first)
        return [first, second, first]
    if leaf.element is not None:
        return [" ".join([f"http://127.0.0.1:{n}", "9"][: leaf.element.max_words]) for n in (11, 12, 13)]
    if leaf.kind is float:
        low = leaf.gt if leaf.gt is not None else leaf.ge
        assert low is not None, f"{leaf.name} has no lower bound"
        assert leaf.le is not None, f"{leaf.name} has no upper bound"
        return [str(low + (leaf.le - low) * share) for share in (0.25, 0.5, 0.75)]
    if leaf.kind is int:
        low = int(leaf.ge or 0)
        high = int(leaf.le or low + 1000)
        return [str(high - 3), str(high - 2), str(high - 1)]
    return ["first", "second", "third"]


def typed(leaf: Leaf, text: str) -> object:
    return parse_text(leaf, text)
