"""The router process: listen, say when it is ready, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal

from diptych.common_config import get_context, get_observability, get_serving
from diptych.httpserver.exposure import open_http, shown_address, warn
from diptych.httpserver.limits import limits_from_config
from diptych.httpserver.listen import BoundedSite, make_runner, shown_url
from diptych.httpserver.tls import TlsError, server_context
from diptych.router import access_log
from diptych.router.app import RouterServer
from diptych.router.workers import WorkerRole

logger = logging.getLogger(__name__)

COLLECT_EVERY = 10_000
"""Objects by which the heap may grow before Python looks for cycles in it; its own default, 700, is little
more than what one request makes."""

HURRY_SECONDS = 0.5
"""After a second signal: for the clients to be told."""


def run() -> int:
    """Serve until SIGTERM or SIGINT (0), a failure (1), or a second signal (130). Needs the configuration
    published."""
    logging.basicConfig(
        level=get_observability().log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if get_observability().log_requests:
        access_log.set_up()
    try:
        return asyncio.run(_serve())
    except TlsError as error:
        logger.error("%s", error)
        return 1
    except OSError as error:
        address = shown_address(get_serving().host, get_serving().port)
        logger.error("cannot listen on %s: %s", address, error)
        return 1


async def _serve() -> int:
    tls = server_context()
    server = RouterServer()
    runner = make_runner(server.app())
    await runner.setup()
    # What is loaded by now stays loaded: no collection need look through it again.
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY)
    stop = _stop_on_signals()
    try:
        serving = get_serving()
        count = server.metrics.connection_refused
        limits = limits_from_config()
        await BoundedSite(runner, limits, count, host=serving.host, port=serving.port, tls=tls).start()
        port = runner.addresses[0][1]
        if get_serving().port == 0:
            # In the same step of the event loop that `start` returns in: no request can have been read yet.
            get_context().override("listening socket", port=port)
        warn(logger, open_http(serving.host))
        announcing = asyncio.create_task(_announce(server, port))
        await stop.wait()
        announcing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await announcing
        logger.info("shutting down: %d requests are running", server.relay.active)
        # Listening goes on while draining, so that new clients get a 503 rather than a refused connection.
        await server.relay.drain(get_serving().shutdown_timeout)
        return 0
    except asyncio.CancelledError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HURRY_SECONDS):
                await server.relay.drain(0)
        return 130
    finally:
        await runner.cleanup()


def _stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second cancels the task that calls this."""
    stop = asyncio.Event()
    main = asyncio.current_task()
    assert main is not None

    def on_signal() -> None:
        if stop.is_set():
            logger.warning("a second signal: what runs is dropped")
            main.cancel()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


async def _announce(server: RouterServer, port: int) -> None:
    """One `ready:` line, once a pair can serve."""
    if not server.registry.has_pair:
        waited_for = ", ".join(str(w) for w in server.registry.workers) or "workers that register"
        logger.info("listening on port %d, waiting for %s", port, waited_for)
    await server.registry.wait_for_pair()
    workers = [f"{role} {len(server.registry.healthy(role))}" for role in WorkerRole]
    print(f"ready: {shown_url(port)} (router; healthy workers: {', '.join(workers)})", flush=True)
