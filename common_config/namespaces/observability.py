"""What is logged."""

from __future__ import annotations

from diptych.common_config.declare import Namespace, leaf


class Observability(Namespace):
    """What is logged."""

    log_level: str = leaf(
        "info", help="Least severe message that is logged.", choices=("debug", "info", "warning", "error")
    )
    log_requests: bool = leaf(False, help="Log a line for each request that ends.")
    profile_dir: str | None = leaf(
        None,
        help="Folder for the traces of /start_profile; made if need be.",
        open_means="no profiles can be recorded",
        metavar="DIR",
    )
