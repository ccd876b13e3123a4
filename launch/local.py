"""`launch-local`: prefill, decode and router on this machine, as three ordinary workers behind one port."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from diptych.common_config import (
    Program,
    Role,
    environment_of,
    get_disagg,
    get_model,
    get_serving,
    parse_command_line,
    publish,
)
from diptych.engine.models.errors import ModelError
from diptych.engine.weights.source import prepare_model
from diptych.httpserver.tls import TlsError, server_context
from diptych.launch.child import Child, ChildFailed
from diptych.launch.errors import StartupError
from diptych.launch.prepare import bind

# Beyond the workers' own shutdown timeout, before a child that doesn't end is killed.
GRACE_SECONDS = 5.0

# The router alone is reached by clients; its workers listen on loopback, and speak plain HTTP to it.
TLS = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT, or until one of the three ends; returns the exit code."""
    record = parse_command_line(Program.LOCAL, argv if argv is not None else sys.argv[1:])
    publish(record, role=Role.LOCAL)
    serving = get_serving()
    try:
        server_context()
        # The router binds it last; that it is taken should not be found out after both models are loaded.
        bind(serving.host, serving.port).close()
    except (StartupError, TlsError) as error:
        print(f"launch-local: {error}", file=sys.stderr)
        return 1
    # Once, here, so that the two workers don't both wait for one conversion without saying why.
    model = get_model()
    try:
        prepare_model(
            model.model_path,
            cache_dir=Path(model.model_cache_dir),
            revision=model.revision,
            load_format=model.load_format,
            report=lambda line: print(line, flush=True),
        )
    except ModelError as error:
        print(f"launch-local: {error}", file=sys.stderr)
        return 1
    environments = {
        program: environment_of(record, program, without=() if program is Program.ROUTER else TLS)
        for program in (Program.PREFILL, Program.DECODE, Program.ROUTER)
    }
    return asyncio.run(_run(environments))


async def _run(environments: dict[Program, dict[str, str | None]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    children: list[Child] = []
    serving = asyncio.create_task(_serve(children, environments))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if serving.done():
        code = 1
        print(f"launch-local: {serving.exception() or serving.result()}; stopping", file=sys.stderr)
    else:
        serving.cancel()
    stopping.cancel()
    await _end_all(children)
    return code


async def _serve(children: list[Child], environments: dict[Program, dict[str, str | None]]) -> str:
    """Start all three and watch them; returns a sentence about the first that ended."""
    worker_flags = ["--host", "127.0.0.1", "--port", "0", "--disaggregation-control-port", "0"]
    prefill = await Child.start(
        "prefill",
        "diptych.launch.prefill",
        [*worker_flags, "--disaggregation-bootstrap-port", "0"],
        environments[Program.PREFILL],
    )
    children.append(prefill)
    decode = await Child.start("decode", "diptych.launch.decode", worker_flags, environments[Program.DECODE])
    children.append(decode)
    prefill_ready, decode_ready = await asyncio.gather(prefill.ready_line(), decode.ready_line())
    serving = get_serving()
    router = await Child.start(
        "router",
        "diptych.launch.router",
        [
            *("--prefill", _url(prefill_ready), _bootstrap_port(prefill_ready)),
            *("--decode", _url(decode_ready)),
            *("--host", serving.host, "--port", str(serving.port)),
        ],
        environments[Program.ROUTER],
    )
    children.append(router)
    address = _url(await router.ready_line())
    _welcome(address, _url(prefill_ready), _url(decode_ready))
    endings = {asyncio.create_task(child.end()): child for child in children}
    done, pending = await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    first = done.pop()
    return f"{endings[first].name} ended with exit code {first.result()}"


async def _end_all(children: list[Child]) -> None:
    """SIGTERM to all, router first so that nothing new comes in; SIGKILL to what outlives the bound."""
    for child in reversed(children):
        child.terminate()
    endings = [asyncio.create_task(child.end()) for child in children]
    if endings:
        bound = get_serving().shutdown_timeout + GRACE_SECONDS
        _, late = await asyncio.wait(endings, timeout=bound)
        for child, ending in zip(children, endings, strict=True):
            if ending in late:
                print(f"launch-local: {child.name} did not end; killing it", file=sys.stderr)
                child.kill()
        await asyncio.gather(*endings)


def _url(ready_line: str) -> str:
    match = re.match(r"https?://\S+", ready_line)
    if match is None:
        raise ChildFailed(f"no address in the ready line {ready_line!r}")
    return match.group()


def _bootstrap_port(ready_line: str) -> str:
    match = re.search(r"\bbootstrap=(\d+)", ready_line)
    if match is None:
        raise ChildFailed(f"no bootstrap port in the ready line {ready_line!r}")
    return match.group(1)


def _welcome(address: str, prefill: str, decode: str) -> None:
    model = get_model().served_model_name
    body = (
        f'{{"model": "{model}", "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32, "temperature": 0}'
    )
    key = " -H 'Authorization: Bearer '\"$DIPTYCH_API_KEY\"" if get_serving().api_key else ""
    print(
        f"ready: {address}\n\n"
        f"  router   {address}\n"
        f"  prefill  {prefill}\n"
        f"  decode   {decode}   (KV pages over {get_disagg().disaggregation_transfer_backend})\n\n"
        f"Try it:\n\n"
        f"  curl -s {address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n\n"
        f"Ctrl-C stops all three (pid {os.getpid()}).",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
