"""The router: which workers it pairs, and how patient it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from diptych.common_config.declare import Derived, Element, Namespace, leaf
from diptych.common_config.programs import Program

DEFAULT_PORT = 0
"""`bootstrap_port` of an entry that doesn't name one, until resolution fills in the router's default."""


DEFAULT_PORTS = {"http": 80, "https": 443}

MAX_HOST = 253
"""Characters of a host name, by DNS."""


class PrefillAddress(msgspec.Struct, frozen=True):
    """A prefill worker as the router is told about it."""

    url: str
    bootstrap_port: int | None = DEFAULT_PORT
    """Port of its bootstrap service; None when it has none."""


_OWN_WORKERS = {Program.LOCAL: "starts its own workers; use launch-router to pair others"}


def parse_url(words: Sequence[str]) -> str:
    """`http://host:port` in the one way in which it is written here: in lower case, without a trailing slash
    and the scheme's own port. Raises ValueError with the reason, which shows no password."""
    (text,) = words
    shown = re.sub(r"^(\w+://)?.*@", r"\1<redacted>@", text, flags=re.DOTALL)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        reason = f": {error}" if shown == text else ""
        raise ValueError(f"{shown!r} is not a URL{reason}") from None
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or any(c.isspace() or c == "\\" for c in text)
    ):
        raise ValueError(f"{shown!r} is not a URL such as http://127.0.0.1:30000")
    if (
        parts.path not in ("", "/")
        or parts.query
        or parts.fragment
        or parts.username is not None
        or port == 0
    ):
        raise ValueError(f"{shown!r} must be only scheme, host and port, such as http://127.0.0.1:30000")
    try:
        name = parts.hostname.encode("idna")
        name.decode("idna")
    except UnicodeError:
        raise ValueError(f"{shown!r} has a host name that can't be one") from None
    if len(name) > MAX_HOST:
        raise ValueError(f"the host name has {len(name)} characters, and {MAX_HOST} at most are possible")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + ("" if port in (None, DEFAULT_PORTS[parts.scheme]) else f":{port}")


def parse_prefill(words: Sequence[str]) -> PrefillAddress:
    """`URL [BOOTSTRAP_PORT]`; the port may be `none`. Raises ValueError with the reason."""
    url = parse_url(words[:1])
    if len(words) == 1:
        return PrefillAddress(url)
    word = words[1]
    if word.lower() == "none":
        return PrefillAddress(url, None)
    if not (word.isascii() and word.isdigit() and len(word) <= 5 and 1 <= int(word) <= 65535):
        raise ValueError(f"bootstrap port {word!r} is neither a port from 1 to 65535 nor none")
    return PrefillAddress(url, int(word))


def prefill_words(entry: Mapping[str, object]) -> list[str]:
    """The words of `{url: …, bootstrap_port: …}`. Raises ValueError with the reason."""
    unknown = sorted(str(key) for key in entry if key not in ("url", "bootstrap_port"))
    if unknown or "url" not in entry:
        raise ValueError(f"{dict(entry)!r} must have the keys url and, if need be, bootstrap_port")
    words = [str(entry["url"])]
    if "bootstrap_port" in entry:
        port = entry["bootstrap_port"]
        words.append("none" if port is None else str(port))
    return words


POLICIES = ("cache_aware", "power_of_two", "round_robin", "random")


class PolicyPair(NamedTuple):
    """The policy of each side."""

    prefill: str
    decode: str


def policy_pair(view: Any) -> PolicyPair:
    """Each side falls back to the base field."""
    return PolicyPair(view.prefill_policy or view.policy, view.decode_policy or view.policy)


class Router(Namespace):
    """Which workers the router pairs, and how patient it is."""

    prefill: tuple[PrefillAddress, ...] = leaf(
        (),
        help="A prefill worker and the port of its bootstrap service (none: it has none). Repeatable.",
        element=Element(parse_prefill, "URL [BOOTSTRAP_PORT]", words=prefill_words, max_words=2),
        refused_by=_OWN_WORKERS,
    )
    decode: tuple[str, ...] = leaf(
        (),
        help="A decode worker. Repeatable.",
        element=Element(parse_url, "URL"),
        refused_by=_OWN_WORKERS,
    )
    policy: str = leaf("cache_aware", help="How a worker of each side is picked.", choices=POLICIES)
    prefill_policy: str | None = leaf(
        None, help="How a prefill worker is picked.", choices=POLICIES, open_means="--policy"
    )
    decode_policy: str | None = leaf(
        None, help="How a decode worker is picked.", choices=POLICIES, open_means="--policy"
    )
    policies: PolicyPair = Derived(
        policy_pair, help="The policies (prefill, decode), each falling back to --policy."
    )
    cache_threshold: float = leaf(
        0.3,
        help="cache_aware: share of a prompt that a prefill worker must have seen to be preferred for it.",
        ge=0,
        le=1,
    )
    balance_abs_threshold: int = leaf(
        8,
        help="cache_aware: requests by which a preferred worker must be busier than others to lose one.",
        unit="requests",
        ge=0,
    )
    balance_rel_threshold: float = leaf(
        1.2, help="cache_aware: how many times as busy it must be as well.", ge=1, le=1000
    )
    max_tree_size: int = leaf(
        1 << 26,
        help="cache_aware: memory for which worker has seen what, about.",
        unit="bytes",
        ge=1 << 16,
        le=1 << 40,
    )
    request_timeout: float = leaf(
        600.0, help="Longest that one request may take.", unit="seconds", gt=0, le=86400
    )
    connect_timeout: float = leaf(
        5.0, help="Patience for a connection to a worker.", unit="seconds", gt=0, le=3600
    )
    first_byte_timeout: float | None = leaf(
        None,
        help="Longest wait for the first byte of an answer, prefill's queue included. An answer that isn't "
        "streamed begins when it is complete.",
        unit="seconds",
        gt=0,
        le=86400,
        open_means="--request-timeout",
    )
    stream_idle_timeout: float | None = leaf(
        None,
        help="Longest wait for the next byte of an answer that has begun. A request that decode has parked "
        "is silent meanwhile.",
        unit="seconds",
        gt=0,
        le=86400,
        open_means="--request-timeout",
    )
    dead_peer_timeout: float = leaf(
        15.0,
        help="How long a worker's machine may not answer on the network before its connections are broken.",
        unit="seconds",
        ge=3,
        le=3600,
    )
    max_concurrent_requests: int | None = leaf(
        None,
        help="Most requests that the router relays at once; others wait for a turn.",
        unit="requests",
        ge=1,
        open_means="any number",
    )
    queue_size: int = leaf(
        1024, help="Most requests that wait for a turn; more are refused with 429.", unit="requests", ge=0
    )
    queue_timeout: float = leaf(
        60.0, help="Longest wait for a turn, then 429.", unit="seconds", gt=0, le=86400
    )
    max_retries: int = leaf(
        2,
        help="Further attempts after one that no worker can have run: no connection, or a 503.",
        unit="attempts",
        ge=0,
        le=100,
    )
    breaker_failures: int = leaf(
        5,
        help="Failures in a row that open a worker's circuit breaker; -1 turns breakers off.",
        unit="failures",
        ge=1,
        le=1_000_000,
        also=(-1,),
    )
    breaker_cooldown: float = leaf(
        10.0, help="How long a breaker stays open before a request tries.", unit="seconds", gt=0, le=86400
    )
    health_interval: float = leaf(
        2.0, help="Time between two health checks of a worker.", unit="seconds", gt=0, le=3600
    )
    health_failure_threshold: int = leaf(
        1, help="Failed checks in a row that take a worker down.", unit="checks", ge=1, le=1000
    )
    health_success_threshold: int = leaf(
        1, help="Good checks in a row that bring a worker up.", unit="checks", ge=1, le=1000
    )
    worker_ca_file: str | None = leaf(
        None,
        help="PEM file of the authorities that vouch for the certificates of https workers.",
        open_means="those of the system",
        metavar="FILE",
        refused_by=_OWN_WORKERS,
    )
    worker_tls_verify: bool = leaf(
        True, help="Check the certificates of https workers.", refused_by=_OWN_WORKERS
    )
    default_bootstrap_port: int = leaf(
        8998,
        help="Bootstrap port of a --prefill that doesn't name one.",
        ge=1,
        le=65535,
        refused_by={Program.LOCAL: "tells its router the ports itself"},
    )
