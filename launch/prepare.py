"""What a worker settles before it publishes its configuration: its ports and where its model is."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.common_config import LaunchConfig, Role, builds_from_record, get_model
from diptych.engine.models.errors import ModelError
from diptych.engine.weights.source import prepare_model
from diptych.httpserver.tls import load_server_context
from diptych.kvtransfer.backends.mooncake_library import why_unavailable
from diptych.launch.errors import StartupError
from diptych.launch.faults import parse_rules
from diptych.server.errors import BadRequest
from diptych.server.frontend import WorkerKind


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is settled before anything is published or started."""

    record: LaunchConfig
    model_dir: Path
    tokenizer_dir: Path
    http: socket.socket
    tls: ssl.SSLContext | None
    """For `http`."""
    bootstrap: socket.socket | None
    scheduler_role: Role
    scheduler_command: Sequence[str]


@builds_from_record
def prepare(
    kind: WorkerKind, record: LaunchConfig, scheduler_role: Role, scheduler_command: Sequence[str]
) -> Prepared:
    """Find the model, bind the ports, and put what that settled on the record. Raises `StartupError`,
    `TlsError` and `ModelError`."""
    if kind is not WorkerKind.COLOCATED and record.disaggregation_transfer_backend == "mooncake":
        problem = why_unavailable(record.mooncake_protocol)
        if problem is not None:
            raise StartupError(problem)
    if kind is not WorkerKind.COLOCATED and record.fault_injection_rules:
        parse_rules(record.fault_injection_rules)
    tls = None
    if record.ssl_certfile is not None:
        tls = load_server_context(record.ssl_certfile, record.ssl_keyfile, record.ssl_keyfile_password)
    # Ports first: a port in use should not be found out after minutes of model conversion.
    http = bind(record.host, record.port)
    derived: dict[str, int] = {"port": http.getsockname()[1]}
    bootstrap = None
    if kind is WorkerKind.PREFILL:
        bootstrap = bind(record.host, record.disaggregation_bootstrap_port)
        derived["disaggregation_bootstrap_port"] = bootstrap.getsockname()[1]
    cache_dir = Path(record.model_cache_dir or "")
    model_dir = prepare_model(
        record.model_path,
        cache_dir=cache_dir,
        revision=record.revision,
        load_format=record.load_format,
        report=_report,
    )
    tokenizer_dir = model_dir
    if record.tokenizer_path not in (None, record.model_path):
        given = Path(record.tokenizer_path or "").expanduser()
        tokenizer_dir = (
            given
            if given.is_dir()
            else prepare_model(str(given), cache_dir=cache_dir, load_format="dummy", report=_report)
        )
    return Prepared(
        record=record.derive("listening sockets", **derived),
        model_dir=model_dir,
        tokenizer_dir=tokenizer_dir,
        http=http,
        tls=tls,
        bootstrap=bootstrap,
        scheduler_role=scheduler_role,
        scheduler_command=scheduler_command,
    )


def find_weights(model_path: str, load_format: str) -> Path:
    """Where the weights to be served from now on lie, converted if need be. Raises `BadRequest`."""
    model = get_model()
    try:
        return prepare_model(
            model_path,
            cache_dir=Path(model.model_cache_dir or ""),
            load_format=load_format,
            report=_report,
        )
    except ModelError as error:
        raise BadRequest(str(error), param="model_path") from None


def _report(line: str) -> None:
    print(line, flush=True)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that doesn't listen yet: who connects before the worker is ready is refused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise StartupError(f"can't listen on {host}:{port}: {error.strerror or error}") from None
    return listener
