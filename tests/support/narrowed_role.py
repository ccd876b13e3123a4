"""A real command one of whose roles may read one namespace less: `narrowed_role.py ROLE NAMESPACE [FLAGS…]`.

With the router's role it is `launch-router`, with a colocated one `launch-colocated`; without flags it is the
scheduler process that such a worker starts.
"""

import sys
from pathlib import Path

from diptych.common_config import Role
from diptych.common_config.role_sets import ROLE_SETS

if __name__ == "__main__":
    role, namespace, flags = Role(sys.argv[1]), sys.argv[2], sys.argv[3:]
    namespaces = ROLE_SETS[role]
    assert namespaces is not None
    assert namespace in namespaces, f"{role.value} reads no {namespace} anyway"
    ROLE_SETS[role] = namespaces - {namespace}
    if role is Role.ROUTER:
        from diptych.launch.router import main

        sys.exit(main(flags))
    if not flags:
        from diptych.launch.scheduler import main as scheduler

        sys.exit(scheduler())
    from diptych.launch.worker import run_worker
    from diptych.server.frontend import WorkerKind

    again = [sys.executable, str(Path(__file__)), role.value, namespace]
    sys.exit(run_worker(WorkerKind.COLOCATED, flags, scheduler_command=again))
