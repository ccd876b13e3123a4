"""Pages of 64 tokens."""

from __future__ import annotations

import pytest
from e2e.equality.conftest import (  # noqa: F401
    of_page_size,
    test_alone,
    test_sixteen_at_once_cold_then_warm,
)

pytestmark = pytest.mark.parametrize("combination", of_page_size(64), ids=str, indirect=True, scope="module")
