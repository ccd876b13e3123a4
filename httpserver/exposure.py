"""What stands open to other machines, said once and loudly at the start."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence

from diptych.common_config import get_serving


def is_loopback(host: str) -> bool:
    """Names count as reachable from elsewhere, but for the one that never is."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def shown_address(host: str, port: int) -> str:
    """As it is written in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_http(host: str) -> list[str]:
    """A line for each way in which HTTP on `host` is open to other machines."""
    serving = get_serving()
    if is_loopback(host):
        return []
    address = shown_address(host, serving.port)
    if serving.api_key is None and serving.admin_api_key is None:
        return [
            f"HTTP on {address} asks for no key: whoever reaches it can generate, flush caches "
            "and abort the requests of others. Set --api-key (DIPTYCH_API_KEY)."
        ]
    if serving.api_key is None:
        return [
            f"HTTP on {address} asks for a key on administrative routes alone: whoever reaches "
            "it can generate. Set --api-key (DIPTYCH_API_KEY)."
        ]
    return []


def warn(logger: logging.Logger, lines: Sequence[str]) -> None:
    """One warning of several lines; none when nothing is open."""
    if lines:
        shown = "\n".join(f"  * {line}" for line in lines)
        logger.warning("THIS SERVER IS OPEN TO OTHER MACHINES:\n%s", shown)
