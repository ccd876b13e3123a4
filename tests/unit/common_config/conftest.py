from __future__ import annotations

from collections.abc import Iterator

import pytest

from diptych.common_config import reset_for_tests
from diptych.common_config.accessors import current, install
from diptych.common_config.namespaces import LEAVES
from diptych.common_config.role_sets import FILE_VARIABLE, MODE_VARIABLE


@pytest.fixture(autouse=True)
def _clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing published and nothing in the environment; as it was afterwards."""
    for variable in (MODE_VARIABLE, FILE_VARIABLE, *(leaf.env for leaf in LEAVES.values())):
        monkeypatch.delenv(variable, raising=False)
    before = current()
    reset_for_tests()
    yield
    install(before)
