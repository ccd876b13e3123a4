from collections.abc import Iterator

import pytest
from support.processes import eventually_no_processes


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test file no process of it runs."""
    yield
    assert eventually_no_processes() == []
