"""A worker's frontend process, from the command line to the exit code. All three worker programs are this."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from aiohttp import web

from diptych.common_config import (
    Program,
    Role,
    get_disagg,
    get_model,
    get_observability,
    get_serving,
    parse_command_line,
    publish,
)
from diptych.engine.models.errors import ModelError
from diptych.engine.wire import SchedulerReady
from diptych.httpserver.exposure import is_loopback, open_http, shown_address, warn
from diptych.httpserver.limits import limits_from_config
from diptych.httpserver.listen import BoundedSite, make_runner, shown_url
from diptych.httpserver.tls import TlsError
from diptych.kvtransfer.bootstrap.service import make_bootstrap_app
from diptych.kvtransfer.cluster import ClusterKeys
from diptych.launch.errors import StartupError
from diptych.launch.prepare import Prepared, find_weights, prepare
from diptych.launch.processes import SchedulerProcess, SchedulerStart, describe_exit
from diptych.launch.registration import registered
from diptych.server.app import make_app
from diptych.server.chat_template import ChatTemplate
from diptych.server.config_overlay import ConfigOverlay
from diptych.server.frontend import Frontend, ModelFacts, WorkerKind
from diptych.server.manager import TokenizerManager
from diptych.server.metrics import FrontendMetrics
from diptych.server.sampling_options import Limits
from diptych.server.scheduler_link import SchedulerLink
from diptych.server.tokenizer import Tokenizer, TokenizerError

logger = logging.getLogger(__name__)

SCHEDULER_COMMAND = (sys.executable, "-m", "diptych.launch.scheduler")

ABORT_SECONDS = 2.0
"""What requests get to end after they were aborted at shutdown."""
SCHEDULER_END_SECONDS = 5.0
"""What the scheduler gets to end in order before it is killed."""
HURRY_SECONDS = 1.0
"""The same after a second signal, or when it never became ready."""

_PROGRAMS = {
    WorkerKind.PREFILL: (Program.PREFILL, Role.PREFILL_FRONTEND, Role.PREFILL_SCHEDULER),
    WorkerKind.DECODE: (Program.DECODE, Role.DECODE_FRONTEND, Role.DECODE_SCHEDULER),
    WorkerKind.COLOCATED: (Program.COLOCATED, Role.COLOCATED_FRONTEND, Role.COLOCATED_SCHEDULER),
}

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


def run_worker(
    kind: WorkerKind,
    argv: Sequence[str] | None = None,
    *,
    scheduler_command: Sequence[str] = SCHEDULER_COMMAND,
) -> int:
    """Serve until SIGTERM or SIGINT (0), a failure (1), or a second signal (130)."""
    program, frontend_role, scheduler_role = _PROGRAMS[kind]
    record = parse_command_line(program, argv)
    try:
        prepared = prepare(kind, record, scheduler_role, scheduler_command)
        publish(prepared.record, role=frontend_role)
        logging.basicConfig(
            level=get_observability().log_level.upper(),
            format=f"%(asctime)s {kind} %(levelname)s %(name)s: %(message)s",
        )
        warn(logger, [*open_http(get_serving().host), *_open_cluster(kind)])
        return asyncio.run(_run(kind, prepared))
    except (StartupError, TlsError, ModelError, TokenizerError) as error:
        print(f"{program.value}: {error}", file=sys.stderr)
        return 1


REMEDY = "Set --cluster-secret (DIPTYCH_CLUSTER_SECRET) on every prefill and decode worker."


def _open_cluster(kind: WorkerKind) -> list[str]:
    """What of prefill and decode's own traffic is open to other machines, a line for each."""
    if kind is WorkerKind.COLOCATED or get_disagg().cluster_secret is not None:
        return []
    lines = []
    host, disagg = get_serving().host, get_disagg()
    if kind is WorkerKind.PREFILL and not is_loopback(host):
        address = shown_address(host, disagg.disaggregation_bootstrap_port)
        lines.append(f"the bootstrap service on {address} lets anyone register. {REMEDY}")
    if not is_loopback(disagg.disaggregation_advertise_host):
        lines.append(
            f"the control port on {disagg.disaggregation_advertise_host} obeys anyone, who can have KV pages "
            f"read and written. {REMEDY}"
        )
    return lines


class Signals:
    """The first SIGTERM or SIGINT asks for an orderly end, the second for one at once."""

    def __init__(self, hurry: Callable[[], object]) -> None:
        self.asked = asyncio.Event()
        self._hurry = hurry
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.asked.is_set():
            self._hurry()
        self.asked.set()


async def _run(kind: WorkerKind, prepared: Prepared) -> int:
    main = asyncio.current_task()
    assert main is not None
    signals = Signals(main.cancel)
    link = SchedulerLink()
    metrics = FrontendMetrics()
    bootstrap = await _start_bootstrap(prepared.bootstrap, metrics)
    scheduler = SchedulerProcess(
        prepared.scheduler_command,
        SchedulerStart(
            record=prepared.record.to_bytes(),
            role=prepared.scheduler_role.value,
            address=link.address,
            model_dir=str(prepared.model_dir),
        ),
    )
    try:
        return await _supervise(kind, prepared, link, scheduler, signals, metrics)
    except asyncio.CancelledError:
        return 130
    finally:
        await scheduler.end(HURRY_SECONDS)
        if bootstrap is not None:
            await bootstrap.cleanup()
        link.close()


async def _start_bootstrap(listener: socket.socket | None, metrics: FrontendMetrics) -> web.AppRunner | None:
    """Listening before the scheduler runs: it registers there."""
    if listener is None:
        return None
    secret = get_disagg().cluster_secret
    keys = None if secret is None else ClusterKeys.from_secret(secret)
    runner = make_runner(make_bootstrap_app(keys, metrics.bootstrap_refused.inc))
    await runner.setup()
    await BoundedSite(runner, limits_from_config(), metrics.connection_refused, sock=listener).start()
    return runner


async def _supervise(
    kind: WorkerKind,
    prepared: Prepared,
    link: SchedulerLink,
    scheduler: SchedulerProcess,
    signals: Signals,
    metrics: FrontendMetrics,
) -> int:
    """Load the tokenizer while the scheduler loads the model, serve, and see to the end."""
    tokenizer = await asyncio.to_thread(Tokenizer, prepared.tokenizer_dir)
    template = _chat_template(tokenizer)
    manager = TokenizerManager(link, tokenizer, metrics, ConfigOverlay(), prefill=kind is WorkerKind.PREFILL)
    receiving = asyncio.create_task(manager.receive())
    stopping = asyncio.create_task(signals.asked.wait())
    endings: set[asyncio.Future[Any]] = {stopping, scheduler.exited, receiving}
    try:
        await asyncio.wait({manager.ready, *endings}, return_when=asyncio.FIRST_COMPLETED)
        if scheduler.exited.done():
            raise StartupError(
                f"the scheduler {describe_exit(scheduler.exited.result())} before it was ready"
            )
        if receiving.done():
            receiving.result()
        if not manager.ready.done():
            return 0  # asked to stop while loading
        frontend = _frontend(kind, prepared, manager, template, manager.ready.result())
        frontend.detect_parsers()
        runner = make_runner(make_app(frontend))
        await runner.setup()
        try:
            site = BoundedSite(
                runner,
                limits_from_config(),
                metrics.connection_refused,
                sock=prepared.http,
                tls=prepared.tls,
            )
            await site.start()
            _announce(frontend)
            async with registered(frontend) as goodbye:
                await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    await goodbye()  # while requests are still taken: no router has to be refused one
            if stopping.done() and await _drains(manager, {scheduler.exited, receiving}):
                await scheduler.exits_within(SCHEDULER_END_SECONDS)
                return 0
            if receiving.done():
                receiving.result()
            reason = describe_exit(scheduler.exited.result())
            logger.error("the scheduler %s; failing its requests", reason)
            manager.scheduler_died(f"the worker's scheduler {reason}")
            return 1
        finally:
            await runner.cleanup()
    finally:
        receiving.cancel()
        stopping.cancel()


async def _drains(manager: TokenizerManager, failures: set[asyncio.Future[Any]]) -> bool:
    """Drain; False if one of `failures` comes first."""
    draining = asyncio.create_task(drain(manager))
    try:
        await asyncio.wait({draining, *failures}, return_when=asyncio.FIRST_COMPLETED)
        return draining.done()
    finally:
        draining.cancel()


async def drain(manager: TokenizerManager) -> None:
    """Admit nothing more; let what runs end within `shutdown_timeout`, abort the rest, tell the scheduler."""
    manager.draining = True
    for bound in (get_serving().shutdown_timeout, ABORT_SECONDS):
        try:
            async with asyncio.timeout(bound):
                await manager.wait_idle()
                break
        except TimeoutError:
            logger.warning("%d samples still run; aborting them", manager.abort_all())
    manager.send_drain()


def _chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The operator's template file, else the model's own. Raises `StartupError`."""
    path = get_model().chat_template
    try:
        source, tool_source = tokenizer.chat_template, tokenizer.tool_chat_template
        if path is not None:
            source, tool_source = Path(path).read_text(encoding="utf-8"), None
        if source is None:
            return None
        special = {name: tokenizer.special(name) for name in SPECIAL_TOKENS}
        known = {name: text for name, text in special.items() if text is not None}
        return ChatTemplate(source, known, tool_source=tool_source)
    except OSError as error:
        raise StartupError(f"--chat-template {path}: {error.strerror}") from None
    except jinja2.TemplateSyntaxError as error:
        raise StartupError(
            f"the chat template {path or 'of the model'} is not valid Jinja (line {error.lineno}): {error}"
        ) from None


def _frontend(
    kind: WorkerKind,
    prepared: Prepared,
    manager: TokenizerManager,
    template: ChatTemplate | None,
    ready: SchedulerReady,
) -> Frontend:
    config = json.loads((prepared.model_dir / "config.json").read_text(encoding="utf-8"))
    model = get_model()
    context_length = ready.context_length
    if kind is not WorkerKind.PREFILL:
        # A request may fill the pool, no more: refused before it runs rather than failed when it has. On a
        # prefill worker only the prompt needs room.
        context_length = min(context_length, ready.max_total_tokens)
    facts = ModelFacts(
        tokenizer_path=model.tokenizer_path or model.model_path,
        model_type=str(config.get("model_type", "")),
        architectures=[str(name) for name in config.get("architectures") or []],
        max_total_tokens=ready.max_total_tokens,
        limits=Limits(context_length=context_length, vocab_size=ready.vocab_size),
    )
    bootstrap_port = prepared.bootstrap.getsockname()[1] if prepared.bootstrap else None
    return Frontend(
        kind=kind,
        model=facts,
        manager=manager,
        chat_template=template,
        created=int(time.time()),
        find_weights=find_weights,
        bootstrap_port=bootstrap_port,
        fault_injection=kind is not WorkerKind.COLOCATED and get_disagg().enable_fault_injection,
    )


def _announce(frontend: Frontend) -> None:
    line = f"ready: {shown_url(get_serving().port)}  role={frontend.kind} model={frontend.served_name}"
    if frontend.bootstrap_port is not None:
        line += f"  bootstrap={frontend.bootstrap_port}"
    print(line, flush=True)
