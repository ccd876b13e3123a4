"""A worker's real frontend with the scripted scheduler: `launch_scripted.py KIND FLAGS…`."""

import sys
from pathlib import Path

from diptych.launch.worker import run_worker
from diptych.server.frontend import WorkerKind

if __name__ == "__main__":
    scheduler = Path(__file__).with_name("scripted_scheduler.py")
    sys.exit(
        run_worker(WorkerKind(sys.argv[1]), sys.argv[2:], scheduler_command=[sys.executable, str(scheduler)])
    )
