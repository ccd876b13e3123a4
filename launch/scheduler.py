"""The scheduler process: started by a frontend (`launch/processes.py`), it publishes the record it is given,
builds its role and runs the loop until the frontend is gone or asks it to drain."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import zmq
from prometheus_client import CollectorRegistry

from diptych.common_config import (
    LaunchConfig,
    Role,
    as_dict,
    get_context,
    get_disagg,
    get_model,
    get_observability,
    get_parallel,
    get_schedule,
    get_spec,
    publish,
)
from diptych.decode.scheduler import DecodeScheduler
from diptych.engine.colocated import ColocatedScheduler
from diptych.engine.frontend_link import FrontendLink
from diptych.engine.models.errors import ModelError
from diptych.engine.runner import ModelRunner
from diptych.engine.scheduler import Scheduler, SchedulerParts
from diptych.engine.weight_update import NewWeights, WeightsRefused
from diptych.httpserver.exposure import is_loopback
from diptych.kernels.registry import UnknownBackendError
from diptych.kvtransfer.backends.interface import TransferBackend
from diptych.kvtransfer.backends.mooncake_library import MooncakeSettings
from diptych.kvtransfer.backends.registry import make_backend
from diptych.kvtransfer.bootstrap.client import register
from diptych.kvtransfer.checksum import PageChecksums
from diptych.kvtransfer.cluster import ClusterKeys
from diptych.kvtransfer.control import ControlEndpoint
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.parts import TransferParts, real_parts
from diptych.kvtransfer.receiver import DecodeReceiver
from diptych.kvtransfer.sender import PrefillSender
from diptych.kvtransfer.settings import TransferSettings
from diptych.kvtransfer.stats import TransferStats
from diptych.launch.assemble import (
    build_grammars,
    build_prefill_scheduler,
    build_prompt_queue,
    build_runner,
    build_running_batch,
    fingerprint,
    weights_loader,
    with_faults,
)
from diptych.launch.errors import StartupError
from diptych.launch.processes import SchedulerStart, read_start

STDIN = 0


def main() -> int:
    """Exit code 0 after an orderly end, 1 when the worker can't start as configured."""
    # Ctrl-C goes to the whole foreground group; ending is the frontend's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    start = read_start(STDIN)
    role = Role(start.role)
    publish(LaunchConfig.from_bytes(start.record), role=role)
    logging.basicConfig(
        level=get_observability().log_level.upper(),
        format=f"%(asctime)s {role.value} %(levelname)s %(name)s: %(message)s",
    )
    try:
        return _run(role, start)
    except (StartupError, ModelError, TransferError, UnknownBackendError) as error:
        print(f"{role.value}: {error}", file=sys.stderr)
        return 1


def _stop(_signal: int, _frame: object) -> None:
    sys.exit(0)


def _run(role: Role, start: SchedulerStart) -> int:
    model_dir = Path(start.model_dir)
    runner = build_runner(model_dir, _report)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    frontend = FrontendLink(context, start.address)
    schedule = get_schedule()
    parts = SchedulerParts(
        runner=runner,
        frontend=frontend,
        registry=CollectorRegistry(),
        parent_fd=STDIN,
        max_requests=schedule.max_running_requests + schedule.max_queued_requests,
        speculative_algorithm=get_spec().speculative_algorithm,
        load_weights=weights_loader(runner),
        grammars=build_grammars(runner.model.config, model_dir),
    )
    try:
        scheduler, close = _ROLES[role](parts, model_dir)
    except zmq.ZMQError as error:
        disagg = get_disagg()
        raise StartupError(
            f"can't bind the control socket on {disagg.disaggregation_advertise_host}:"
            f"{disagg.disaggregation_control_port}: {error.strerror}"
        ) from error
    try:
        scheduler.run()
    finally:
        scheduler.close()
        # The transfer library first: it must let go of the slab before the slab goes.
        close()
        frontend.close()
        context.term()
    return 0


RoleParts = tuple[Scheduler, Callable[[], None]]
"""The scheduler, and what releases its transfer endpoint."""


def _colocated(parts: SchedulerParts, _model_dir: Path) -> RoleParts:
    batch = build_running_batch(parts.runner)
    queue = build_prompt_queue(parts.runner, keep_free=batch.keep_free)
    scheduler = ColocatedScheduler(parts, queue, batch, max_running=get_schedule().max_running_requests)
    return scheduler, lambda: None


def _prefill(parts: SchedulerParts, model_dir: Path) -> RoleParts:
    disagg = get_disagg()
    identity, keys = Identity.current(), _cluster_keys()
    transfer, faults = with_faults(_transfer_parts(parts, model_dir, identity, keys))
    sender = PrefillSender(transfer)
    route = sender.route(
        worker_id=identity.instance_id,
        # After the runner is built: what a load-time gate turned off is off in here too.
        published={"schedule": as_dict(get_schedule()), "disagg": as_dict(disagg)},
        world_size=get_parallel().world_size,
    )
    timeout = disagg.handshake_timeout
    host, port = disagg.disaggregation_advertise_host, disagg.disaggregation_bootstrap_port
    register(host, port, route, timeout=timeout, keys=keys)

    def load_weights(directory: Path, load_format: str) -> NewWeights:
        """Decode workers must see that they are others, and match once they have them too."""
        weights = parts.load_weights(directory, load_format)
        try:
            register(host, port, route.with_weights(weights.fingerprint), timeout=timeout, keys=keys)
        except TransferError as error:
            raise WeightsRefused(str(error)) from error
        return weights

    registering = replace(parts, faults=faults, load_weights=load_weights)
    return build_prefill_scheduler(registering, sender), sender.close


def _decode(parts: SchedulerParts, model_dir: Path) -> RoleParts:
    transfer, faults = with_faults(_transfer_parts(parts, model_dir, Identity.current(), _cluster_keys()))
    receiver = DecodeReceiver(transfer, world_size=get_parallel().world_size)
    scheduler = DecodeScheduler(
        replace(parts, faults=faults),
        receiver,
        build_running_batch(parts.runner),
        max_running=get_schedule().max_running_requests,
        max_receiving_fraction=get_disagg().max_receiving_fraction,
        retracted_timeout=get_disagg().retracted_timeout,
        default_bootstrap_port=get_disagg().disaggregation_bootstrap_port,
    )
    return scheduler, receiver.close


_ROLES: dict[Role, Callable[[SchedulerParts, Path], RoleParts]] = {
    Role.PREFILL_SCHEDULER: _prefill,
    Role.DECODE_SCHEDULER: _decode,
    Role.COLOCATED_SCHEDULER: _colocated,
}


def _cluster_keys() -> ClusterKeys | None:
    secret = get_disagg().cluster_secret
    return None if secret is None else ClusterKeys.from_secret(secret)


def _transfer_parts(
    parts: SchedulerParts, model_dir: Path, identity: Identity, keys: ClusterKeys | None
) -> TransferParts:
    """Raises `zmq.ZMQError` when the control socket can't be bound."""
    disagg = get_disagg()
    settings = _settings()
    stats = TransferStats(parts.registry, backend=disagg.disaggregation_transfer_backend)
    backend = _backend(parts.runner, identity)
    control = ControlEndpoint(
        identity,
        disagg.disaggregation_advertise_host,
        disagg.disaggregation_control_port,
        settings.heartbeat_interval,
        stats,
        keys,
    )
    if disagg.disaggregation_control_port == 0:
        # Before the route is registered, so that what decode is told names the real port, like the readback.
        get_context().override("control socket", disaggregation_control_port=control.port)
    return real_parts(
        backend=backend,
        checksums=PageChecksums(parts.runner.pool.slab, page_bytes=parts.runner.pool.layout.page_bytes),
        control=control,
        fingerprint=fingerprint(
            parts.runner, model_dir, parts.runner.facts.load_format, get_model().random_seed
        ),
        identity=identity,
        settings=settings,
        stats=stats,
        keys=keys,
    )


def _backend(runner: ModelRunner, identity: Identity) -> TransferBackend:
    disagg = get_disagg()
    return make_backend(
        disagg.disaggregation_transfer_backend,
        runner.pool.slab,
        page_bytes=runner.pool.layout.page_bytes,
        agent=identity.instance_id,
        ucx_tls=disagg.nixl_ucx_tls,
        loopback=is_loopback(disagg.disaggregation_advertise_host),
        mooncake=MooncakeSettings(
            host=disagg.disaggregation_advertise_host,
            protocol=disagg.mooncake_protocol,
            ib_device=disagg.disaggregation_ib_device or "",
            # Later than the control connection is given up, so that its reason is the one that clients see.
            stall_timeout=4 * disagg.heartbeat_interval,
        ),
    )


def _settings() -> TransferSettings:
    disagg = get_disagg()
    return TransferSettings(
        handshake_timeout=disagg.handshake_timeout,
        bootstrap_timeout=disagg.bootstrap_timeout,
        receive_timeout=disagg.receive_timeout,
        transfer_timeout=disagg.transfer_timeout,
        heartbeat_interval=disagg.heartbeat_interval,
        checksum=disagg.enable_kv_checksum,
    )


def _report(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
