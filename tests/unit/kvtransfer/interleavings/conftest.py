from __future__ import annotations

import pytest

from .world import World


@pytest.fixture
def world() -> World:
    made = World()
    made.start("p0")
    made.start("d0")
    return made
