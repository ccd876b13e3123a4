"""Pages of 64 tokens."""

from __future__ import annotations

import pytest
from e2e.equality.conftest import Combination, check_alone, check_crowd, of_page_size
from support.cluster import Cluster
from support.oracle import GreedyOracle

pytestmark = pytest.mark.parametrize("combination", of_page_size(64), ids=str, indirect=True, scope="module")


def test_sixteen_at_once_cold_then_warm(
    cluster: Cluster, combination: Combination, prompts: list[list[int]], oracle: GreedyOracle
) -> None:
    check_crowd(cluster, combination, prompts, oracle)


def test_alone(
    cluster: Cluster, combination: Combination, prompts: list[list[int]], oracle: GreedyOracle
) -> None:
    check_alone(cluster, combination, prompts, oracle)
