"""The HTTP surface."""

from __future__ import annotations

from diptych.common_config.declare import Namespace, leaf
from diptych.common_config.programs import Program


class Serving(Namespace):
    """The HTTP surface."""

    host: str = leaf("127.0.0.1", help="Address to listen on; 0.0.0.0 is every one.", metavar="HOST")
    port: int = leaf(
        30000,
        help="Port to listen on; 0 takes a free one.",
        ge=0,
        le=65535,
        program_defaults={Program.LOCAL: 8000, Program.ROUTER: 8000},
    )
    api_key: str | None = leaf(
        None,
        help="The bearer token that clients must send.",
        open_means="anyone may send requests",
        secret=True,
        metavar="KEY",
    )
    max_request_bytes: int = leaf(
        8 << 20, help="Largest request body; a larger one gets a 413.", unit="bytes", ge=1024, le=1 << 32
    )
    shutdown_timeout: float = leaf(
        10.0,
        help="How long running requests may go on after SIGTERM before they are failed.",
        unit="seconds",
        ge=0,
        le=86400,
    )
    default_max_tokens: int | None = leaf(
        None,
        help="Output of a request that doesn't say.",
        unit="tokens",
        ge=1,
        open_means="the rest of the context",
    )
    max_n: int = leaf(128, help="Most samples that one prompt may ask for.", unit="samples", ge=1, le=65536)
