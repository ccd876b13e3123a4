"""The bootstrap service of a prefill worker."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web


def make_bootstrap_app(*, schedule: Mapping[str, object] | None = None) -> web.Application:
    """Routes `PUT /route`, `GET /route`, `GET /schedule`, `GET /health`. `schedule` is the worker's
    published schedule bag as plain JSON values."""
    raise NotImplementedError
