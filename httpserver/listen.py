"""Serving an application over bounded connections, with or without TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from aiohttp import web

from diptych.common_config import get_serving
from diptych.httpserver.limits import HttpLimits
from diptych.httpserver.protocol import BoundedProtocol, watch_requests
from diptych.httpserver.refusals import Cause, Refusals

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 1.0
"""What handlers get for their last bytes when the server ends."""


def make_runner(app: web.Application) -> web.AppRunner:
    """Serve it with a `BoundedSite`. A handler is cancelled when its client leaves: that is what frees the
    client's pages at once."""
    app.middlewares.insert(0, watch_requests)
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)


class BoundedSite(web.BaseSite):
    """Listens on a bound socket, or on every address of `host`. `count_refusal` is told of each connection
    that ended in an error before a request reached a route."""

    def __init__(
        self,
        runner: web.BaseRunner,
        limits: HttpLimits,
        count_refusal: Callable[[Cause], None],
        *,
        sock: socket.socket | None = None,
        host: str | None = None,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=1024)
        self._runner_of_site = runner
        self._limits = limits
        self._refusals = Refusals(logger, count_refusal)
        self._sock = sock
        self._address = (host, port)
        self._tls = tls

    @property
    def name(self) -> str:
        scheme = "http" if self._tls is None else "https"
        host, port = self._sock.getsockname()[:2] if self._sock is not None else self._address
        return f"{scheme}://{host}:{port}"

    async def start(self) -> None:
        """Raises `OSError` when the address can't be had."""
        await super().start()
        loop = asyncio.get_running_loop()
        manager = self._runner_of_site.server
        assert manager is not None, "the runner is set up first"
        limits, refusals = self._limits, self._refusals

        def connection() -> BoundedProtocol:
            return BoundedProtocol(manager, loop=loop, limits=limits, refusals=refusals)

        timeout = None if self._tls is None else limits.receive_timeout
        if self._sock is not None:
            self._server = await loop.create_server(
                connection, sock=self._sock, ssl=self._tls, backlog=1024, ssl_handshake_timeout=timeout
            )
        else:
            host, port = self._address
            self._server = await loop.create_server(
                connection, host, port, ssl=self._tls, backlog=1024, ssl_handshake_timeout=timeout
            )


def shown_url(port: int) -> str:
    """What clients on this machine connect to, by the published settings."""
    serving = get_serving()
    scheme = "http" if serving.ssl_certfile is None else "https"
    host = f"[{serving.host}]" if ":" in serving.host else serving.host
    return f"{scheme}://{host}:{port}"
