"""A worker makes itself known to routers, stays known, and says goodbye.

One task for each `--router-url` posts what the worker is to the router's `/workers`, again in every third of
the lease. The router forgets a worker whose lease ran out; one that has forgotten everything, having been
restarted, knows the worker again after the next post. A router that can't be reached costs a few connections
a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
from yarl import URL

from diptych.common_config import get_disagg, get_serving
from diptych.httpserver.access import Access, own_authorization
from diptych.httpserver.exposure import is_loopback
from diptych.server.frontend import Frontend, WorkerKind

logger = logging.getLogger(__name__)

FIRST_RETRY = 0.25
"""Seconds after the first failure; doubled with each further one, up to a third of the lease."""
ANSWER_SECONDS = 5.0
"""What a router gets to answer."""
GOODBYE_SECONDS = 1.0
"""The same when the worker is about to end."""


class Announcement(msgspec.Struct, kw_only=True):
    """The body of the post."""

    url: str
    role: str
    bootstrap_port: int | None
    instance_id: str
    lease: float
    """Seconds."""


def announcement(frontend: Frontend) -> Announcement:
    """What this worker says of itself. The instance id is drawn anew: make one per process."""
    return Announcement(
        url=advertised_url(),
        role=frontend.kind.value,
        bootstrap_port=frontend.bootstrap_port,
        instance_id=secrets.token_hex(8),
        lease=get_disagg().registration_lease,
    )


def advertised_url() -> str:
    """Where routers reach this worker: `--advertise-url`, else its HTTP port on the address for its peers."""
    disagg, serving = get_disagg(), get_serving()
    if disagg.advertise_url is not None:
        return disagg.advertise_url.rstrip("/")
    host = disagg.disaggregation_advertise_host
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if serving.ssl_certfile is None else 'https'}://{shown}:{serving.port}"


class _Refused(Exception):
    """The router answered, but not with a 2xx."""


class Registration:
    """One worker at one router, from the moment this is made."""

    def __init__(self, router: str, worker: Announcement, session: aiohttp.ClientSession) -> None:
        self._router = router
        self._worker = worker
        self._session = session
        self._known = False
        self._told = ""
        """The last trouble that was logged."""
        self._keeping = asyncio.create_task(self._keep(), name=f"registration at {router}")

    async def leave(self) -> None:
        """The router gives this worker no new request from now on. Never raises: the lease ends it too."""
        await self.stop()
        if not self._known:
            return
        # By URL: the id is the router's affair. The instance keeps a successor on this address safe.
        path = f"/workers/{quote(self._worker.url, safe='')}?instance_id={self._worker.instance_id}"
        try:
            await self._ask("DELETE", path, GOODBYE_SECONDS)
        except (aiohttp.ClientError, OSError, _Refused) as error:
            logger.warning("could not say goodbye to the router %s: %s", self._router, _reason(error))
        self._known = False

    async def stop(self) -> None:
        """Renew no more. Raises what ended the renewing, if that was a fault of ours."""
        self._keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeping

    async def _keep(self) -> None:
        interval, delay = self._worker.lease / 3, FIRST_RETRY
        body = msgspec.json.encode(self._worker)
        while True:
            try:
                await self._ask("POST", "/workers", ANSWER_SECONDS, body)
            except (aiohttp.ClientError, OSError, _Refused) as error:
                self._trouble(_reason(error))
                await asyncio.sleep(delay)
                delay = min(2 * delay, interval)
            else:
                if not self._known or self._told:
                    logger.info("registered at the router %s as %s", self._router, self._worker.url)
                self._known, self._told, delay = True, "", FIRST_RETRY
                await asyncio.sleep(interval)

    async def _ask(self, method: str, path: str, limit: float, body: bytes | None = None) -> None:
        headers = {"Content-Type": "application/json"}
        if (key := own_authorization(Access.ADMIN)) is not None:
            headers["Authorization"] = key
        async with self._session.request(
            method,
            URL(self._router + path, encoded=True),  # else the escaped slashes would become ordinary ones
            data=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=limit),
            allow_redirects=False,
        ) as response:
            text = (await response.content.read(1024)).decode("utf-8", "replace")
        if not 200 <= response.status < 300:
            raise _Refused(f"it answers {response.status}: {text.strip() or response.reason}")

    def _trouble(self, reason: str) -> None:
        """Logged when it is new, not with every attempt."""
        if reason != self._told:
            logger.warning("can't register at the router %s, trying on: %s", self._router, reason)
        self._told = reason


def _reason(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


@contextlib.asynccontextmanager
async def registered(frontend: Frontend) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """Keep the worker known to every `--router-url` while the block runs. Gives the function that says
    goodbye to all of them, within `GOODBYE_SECONDS`."""
    urls = get_disagg().router_url if frontend.kind is not WorkerKind.COLOCATED else ()
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        registrations: list[Registration] = []
        if urls:
            worker = announcement(frontend)
            _warn_if_out_of_reach(worker.url, urls)
            registrations = [Registration(url, worker, session) for url in urls]

        async def goodbye() -> None:
            await asyncio.gather(*(registration.leave() for registration in registrations))

        try:
            yield goodbye
        finally:
            await asyncio.gather(*(registration.stop() for registration in registrations))


def _warn_if_out_of_reach(url: str, routers: Sequence[str]) -> None:
    hosts = [urlsplit(router).hostname or "" for router in routers]
    if is_loopback(urlsplit(url).hostname or "") and not all(is_loopback(host) for host in hosts):
        logger.warning(
            "routers are told to reach this worker at %s, which only this machine can: "
            "set --disaggregation-advertise-host, or --advertise-url",
            url,
        )
