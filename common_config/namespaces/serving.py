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
    admin_api_key: str | None = leaf(
        None,
        help="The bearer token for routes that change the server (flush, abort, update), where --api-key "
        "then gets a 403. It opens the others as well.",
        open_means="--api-key opens them",
        secret=True,
        metavar="KEY",
    )
    ssl_certfile: str | None = leaf(
        None,
        help="PEM file of the certificate and its chain: HTTPS instead of HTTP.",
        open_means="plain HTTP",
        metavar="FILE",
    )
    ssl_keyfile: str | None = leaf(
        None,
        help="PEM file of the certificate's private key.",
        open_means="it is in --ssl-certfile",
        metavar="FILE",
    )
    ssl_keyfile_password: str | None = leaf(
        None,
        help="What the private key is encrypted with.",
        open_means="it is not encrypted",
        secret=True,
        metavar="PASSWORD",
    )
    http_receive_timeout: float = leaf(
        30.0,
        help="Longest that the head of a request may take to arrive, and then its body.",
        unit="seconds",
        gt=0,
        le=86400,
    )
    http_send_timeout: float = leaf(
        60.0,
        help="Longest that a client may leave an answer unread; then its request is aborted.",
        unit="seconds",
        gt=0,
        le=86400,
    )
    http_keepalive_timeout: float = leaf(
        75.0,
        help="Longest that a connection may stay open without a request.",
        unit="seconds",
        gt=0,
        le=86400,
    )
    http_max_connections: int = leaf(
        8192,
        help="Most open connections; one more is answered with a 503 and closed.",
        unit="connections",
        ge=1,
        le=1 << 20,
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
        open_means="16 tokens on /v1/completions and 128 on /generate, else the rest of the context",
    )
    tool_call_parser: str = leaf(
        "auto",
        help="How the model writes tool calls; auto goes by its chat template. With hermes, a template that "
        "shows no tools gets them in a system message.",
        choices=("auto", "none", "hermes", "llama3_json", "mistral", "pythonic"),
    )
    reasoning_parser: str = leaf(
        "auto",
        help="How the model writes what it thinks before it answers; auto goes by its chat template.",
        choices=("auto", "none", "deepseek_r1", "qwen3", "mistral", "seed_oss", "kimi"),
    )
    max_n: int = leaf(128, help="Most samples that one prompt may ask for.", unit="samples", ge=1, le=65536)
