"""One worker as the router knows it, and whether it may be given requests."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import logging
import os
import ssl
import time
from collections.abc import Callable, Mapping

import aiohttp
from yarl import URL

from diptych.common_config import get_router
from diptych.router.breaker import CircuitBreaker
from diptych.router.worker_facts import WorkerClient, WorkerFacts

logger = logging.getLogger(__name__)

DOWN_POLL_INTERVAL = 0.25
"""Seconds between polls of a worker that is down or may be (never longer than health_interval): start-up and
recovery are noticed soon, while healthy workers are left in peace."""

MODEL_POLLS = 5
"""Every so many good polls the worker is asked for its models: names change at run time, but seldom."""


def connection_reason(error: Exception) -> str:
    """Why a call to a worker got no (whole) answer, short enough for a client's error message."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the host name can't be resolved"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        what = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else cause
        return f"its certificate is not trusted: {what} (--worker-ca-file names who is trusted)"
    if isinstance(error, aiohttp.ClientSSLError):
        return f"TLS failed: {error.os_error}"
    if isinstance(error, aiohttp.ClientConnectorError) and error.errno:
        return os.strerror(error.errno).lower()
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "closed before the answer was complete"
    return str(error) or type(error).__name__


class WorkerRole(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Origin(enum.StrEnum):
    """Who told the router about a worker."""

    FLAG = "flag"
    """`--prefill` or `--decode`."""
    API = "api"
    """`POST /workers`."""
    SELF = "self"
    """The worker, which renews a lease."""


def worker_id(role: WorkerRole, url: str) -> str:
    """The same for the same worker in every run of every router, and fit for a URL's path."""
    return f"{role}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


class Worker:
    """One worker. Down until its first good poll; a failed connection takes it down at once."""

    def __init__(
        self,
        role: WorkerRole,
        url: str,
        bootstrap_port: int | None = None,
        *,
        origin: Origin = Origin.FLAG,
        instance_id: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.id = worker_id(role, self.url)
        self.bootstrap_port = bootstrap_port
        self.origin = origin
        self.instance_id = instance_id
        """Differs between two processes that had the same address one after the other; None if unknown."""
        self.labels = dict(labels or {})
        self.lease: float | None = None
        """Seconds after which it is forgotten unless it renews; None for ever."""
        self.added_at = time.time()
        """Unix seconds."""
        self.healthy = False
        self.reason = "not polled yet"
        """Why it is down; empty when healthy."""
        self.warning = ""
        """What an operator should see to though requests go there; empty when nothing."""
        self.facts = WorkerFacts()
        self.models: frozenset[str] | None = None
        """Names that it answers to; None while it hasn't said."""
        self.in_flight = 0
        """Requests of this router that the worker hasn't finished answering."""
        self._bytes_in_flight = 0
        self.breaker = CircuitBreaker(str(self))
        self._failures = 0
        self._successes = 0
        self._polls = 0
        self._poll_now = asyncio.Event()
        self._on_change: Callable[[], None] | None = None
        self._on_idle: Callable[[], None] | None = None
        host = URL(self.url).host
        if not host:
            raise ValueError(f"{role} worker URL {url!r} has no host; expected http://HOST:PORT")
        self.host = host

    def __str__(self) -> str:
        return f"{self.role} worker {self.url}"

    def answers_to(self, model: str | None) -> bool:
        """Whether it may serve a request for that model; None: for any."""
        return model is None or self.models is None or model in self.models

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever `healthy` flips."""
        self._on_change = on_change

    def when_idle(self, on_idle: Callable[[], None]) -> None:
        """Call `on_idle` once nothing is in flight: now, if nothing is."""
        if self.in_flight == 0:
            on_idle()
        else:
            self._on_idle = on_idle

    @property
    def load(self) -> tuple[int, int]:
        """To compare workers by: requests in flight, then bytes of their bodies."""
        return self.in_flight, self._bytes_in_flight

    def begin(self, size: int) -> None:
        """A request of `size` bytes goes to this worker; `end` follows, however it ends."""
        self.in_flight += 1
        self._bytes_in_flight += size

    def end(self, size: int) -> None:
        self.in_flight -= 1
        self._bytes_in_flight -= size
        if self.in_flight == 0 and self._on_idle is not None:
            self._on_idle()
            self._on_idle = None

    def mark_up(self) -> None:
        self._set(True, "")

    def mark_down(self, reason: str) -> None:
        """No new request goes here until polls succeed again."""
        self._successes = 0
        self._set(False, reason)
        self._poll_now.set()

    def suspect(self) -> None:
        """Something broke that may or may not be the worker's death: poll it now."""
        self._poll_now.set()

    def _set(self, healthy: bool, reason: str) -> None:
        flipped = healthy != self.healthy
        self.healthy, self.reason = healthy, reason
        if not flipped:
            return
        if healthy:
            logger.info("%s is up", self)
            self.breaker.recovered()
        else:
            logger.warning("%s is down: %s", self, reason)
        if self._on_change is not None:
            self._on_change()

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """One `GET /health`: 2xx counts for it, anything else against it."""
        client = WorkerClient(session, self.url)
        try:
            status = await client.health()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            reason = f"/health: {connection_reason(error)}"
            if isinstance(error, aiohttp.ClientSSLError) and reason != self.reason and not self.healthy:
                logger.error("%s gets no requests: %s", self, reason)  # waiting won't mend it
            return self._bad_poll(reason)
        if not 200 <= status < 300:
            return self._bad_poll(f"/health answers {status}")
        self._failures = 0
        self._successes += 1
        self._polls += 1
        coming_up = not self.healthy
        if coming_up and self._successes < get_router().health_success_threshold:
            return None
        if coming_up and (wrong := await self._wrong_role(client)):
            if wrong != self.reason:
                logger.error("%s gets no requests: %s", self, wrong)
            return self._set(False, wrong)
        if coming_up or self._polls % MODEL_POLLS == 0:
            await self._ask_models(client)
            self._warn(client.key_refused)
        return self.mark_up()

    def _warn(self, warning: str) -> None:
        if warning and warning != self.warning:
            logger.warning("%s %s", self, warning)
        self.warning = warning

    def _bad_poll(self, reason: str) -> None:
        self._successes = 0
        self._failures += 1
        if not self.healthy or self._failures >= get_router().health_failure_threshold:
            self._set(False, reason)

    async def _wrong_role(self, client: WorkerClient) -> str:
        """Why a worker that is coming up is not what the router was told; empty when it is or doesn't say.

        Two URLs that were mixed up would otherwise answer with one token and status 200."""
        facts = await client.facts()
        if facts is None:
            return ""
        self.facts = facts
        return role_mismatch(self.role, facts)

    async def _ask_models(self, client: WorkerClient) -> None:
        models = await client.models()
        if models is not None:
            names = {str(model[key]) for model in models for key in ("id", "root") if model.get(key)}
            self.models = frozenset(names)

    async def monitor(self, session: aiohttp.ClientSession) -> None:
        """Poll for ever: every `health_interval` while up, more often while down, at once when told to."""
        while True:
            self._poll_now.clear()
            await self.poll(session)
            interval = get_router().health_interval
            if not self.healthy or self._failures:
                # Woken or not, a dead worker isn't polled in a tight loop.
                await asyncio.sleep(min(interval, DOWN_POLL_INTERVAL))
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poll_now.wait(), interval)


def role_mismatch(role: WorkerRole, facts: WorkerFacts) -> str:
    """What is wrong with taking this worker for a `role` worker; empty when nothing is, or it doesn't say."""
    if facts.mode is None or facts.mode == role.value:
        return ""
    actual = "colocated" if facts.mode == "null" else facts.mode
    return f"it is a {actual} worker, but was given as {role}"
