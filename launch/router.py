"""`launch-router`: pairs prefill and decode workers behind one address."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from diptych.common_config import Program, Role, parse_command_line, publish
from diptych.router.process import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until SIGTERM or SIGINT; returns the exit code."""
    record = parse_command_line(Program.ROUTER, argv if argv is not None else sys.argv[1:])
    publish(record, role=Role.ROUTER)
    return run()


if __name__ == "__main__":
    sys.exit(main())
