"""The launch record, its resolution, and the published namespace bags.

An entry point does `record = parse_command_line(Program.X)` and `publish(record, role=Role.X)`; everything
else reads `get_schedule().page_size` and the like.
"""

from diptych.common_config.accessors import (
    effective_value,
    get_context,
    get_device,
    get_disagg,
    get_exec,
    get_memory,
    get_model,
    get_observability,
    get_parallel,
    get_router,
    get_schedule,
    get_serving,
    get_spec,
    publish,
    readback,
)
from diptych.common_config.command_line import parse_command_line
from diptych.common_config.context import as_dict
from diptych.common_config.errors import (
    ConfigError,
    FrozenRecordError,
    NotPublishedError,
    RoleNamespaceError,
    SealedBagError,
)
from diptych.common_config.gates import turn_off_chunked_prefix_cache
from diptych.common_config.namespaces.exec import AttentionPair
from diptych.common_config.namespaces.router import PrefillAddress
from diptych.common_config.namespaces.router import parse_url as parse_worker_url
from diptych.common_config.programs import Program, Role
from diptych.common_config.record import (
    LaunchConfig,
    Provenance,
    builds_from_record,
    check_value,
    environment_of,
    hide_secret,
)
from diptych.common_config.resolution import resolve
from diptych.common_config.testing import override_config, reset_for_tests
from diptych.common_config.values import BadValue

__all__ = [
    "AttentionPair",
    "BadValue",
    "ConfigError",
    "FrozenRecordError",
    "LaunchConfig",
    "NotPublishedError",
    "PrefillAddress",
    "Program",
    "Provenance",
    "Role",
    "RoleNamespaceError",
    "SealedBagError",
    "as_dict",
    "builds_from_record",
    "check_value",
    "effective_value",
    "environment_of",
    "get_context",
    "get_device",
    "get_disagg",
    "get_exec",
    "get_memory",
    "get_model",
    "get_observability",
    "get_parallel",
    "get_router",
    "get_schedule",
    "get_serving",
    "get_spec",
    "hide_secret",
    "override_config",
    "parse_command_line",
    "parse_worker_url",
    "publish",
    "readback",
    "reset_for_tests",
    "resolve",
    "turn_off_chunked_prefix_cache",
]
