"""The router process: listen, say when it is ready, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from diptych.common_config import get_context, get_observability, get_serving
from diptych.router.app import RouterServer
from diptych.router.workers import WorkerRole

logger = logging.getLogger(__name__)

CLEANUP_TIMEOUT = 1.0
"""Seconds that handlers get for their last bytes once draining is over."""


class _PeersFault(logging.Filter):
    """Bytes that are no HTTP are a client's mistake, not worth a traceback in our log."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)


http_logger = logging.getLogger("diptych.router.http")
http_logger.addFilter(_PeersFault())


def run() -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Needs the configuration published."""
    logging.basicConfig(
        level=get_observability().log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        asyncio.run(_serve())
    except OSError as error:
        logger.error("cannot listen on %s:%d: %s", get_serving().host, get_serving().port, error)
        return 1
    return 0


async def _serve() -> None:
    server = RouterServer()
    runner = web.AppRunner(
        server.app(),
        handler_cancellation=True,
        access_log=None,
        logger=http_logger,
        shutdown_timeout=CLEANUP_TIMEOUT,
    )
    await runner.setup()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        site = web.TCPSite(runner, get_serving().host, get_serving().port, backlog=1024)
        await site.start()
        port = runner.addresses[0][1]
        if get_serving().port == 0:
            # In the same step of the event loop that `start` returns in: no request can have been read yet.
            get_context().override("listening socket", port=port)
        announcing = asyncio.create_task(_announce(server, port))
        await stop.wait()
        announcing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await announcing
        logger.info("shutting down: %d requests are running", server.relay.active)
        # Listening goes on while draining, so that new clients get a 503 rather than a refused connection.
        await server.relay.drain(get_serving().shutdown_timeout)
    finally:
        await runner.cleanup()


async def _announce(server: RouterServer, port: int) -> None:
    """One `ready:` line, once a pair can serve."""
    if not server.registry.has_pair:
        waited_for = ", ".join(str(w) for w in server.registry.workers) or "workers: none is configured"
        logger.info("listening on port %d, waiting for %s", port, waited_for)
    await server.registry.wait_for_pair()
    host = get_serving().host
    shown = f"[{host}]" if ":" in host else host
    workers = [f"{role} {len(server.registry.healthy(role))}" for role in WorkerRole]
    print(f"ready: http://{shown}:{port} (router; healthy workers: {', '.join(workers)})", flush=True)
