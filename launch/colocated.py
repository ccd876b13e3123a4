"""`launch-colocated`: both phases in one worker, without a transfer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from diptych.launch.worker import run_worker
from diptych.server.frontend import WorkerKind


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; returns the exit code."""
    return run_worker(WorkerKind.COLOCATED, argv)


if __name__ == "__main__":
    sys.exit(main())
