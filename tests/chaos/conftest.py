"""What failure must look like, row by row, and what shows it. Both backends, real processes.

| event | shown by |
|---|---|
| bad input; more than the context holds | `tests/e2e/test_bad_input.py`; a pool: `test_rooms_and_pools.py` |
| prefill or decode dies, in each state | `each_state/test_killed.py` |
| … and only its requests fail | `tests/integration/kvtransfer/test_peers_that_die.py` |
| the client leaves or aborts, in each state | `each_state/test_ended_by_the_client.py` |
| a peer restarts on the same address | `each_state/test_killed.py` |
| a worker stalls, in each state | `each_state/test_stopped.py` |
| transfers hang or crawl | `test_rooms_and_pools.py` |
| the network goes away | `test_two_hosts.py` |
| duplicate room | `test_rooms_and_pools.py` |
| garbled messages, impossible completions, strangers | `test_forged_messages.py` |
| lies about pages, rooms and leases | `test_lying_peers.py` |
| workers that don't match | `tests/e2e/test_mismatch.py` |
| the pool is exhausted; parked requests in all of the above | `test_rooms_and_pools.py` |

After each the pools are at their baseline and the next request is right. `support/staged.py` has the states.
"""

from collections.abc import Iterator

import pytest
from support.processes import eventually_no_processes


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test file no process of it runs."""
    yield
    assert eventually_no_processes() == []
