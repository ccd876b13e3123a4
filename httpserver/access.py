"""Who may use a route: every route is of one kind, and each kind takes certain keys.

| kind | with `--api-key` | with `--admin-api-key` as well |
|---|---|---|
| `OPEN` | no key | no key |
| `READING`, `GENERATING` | either key | either key |
| `ADMIN` | the API key | the admin key; the API key gets a 403 |

With `--admin-api-key` alone only `ADMIN` asks for a key.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Mapping

from aiohttp import web

from diptych.common_config import get_serving


class Access(enum.Enum):
    OPEN = "open"
    """Load balancers and scrapers ask, who carry no key."""
    READING = "reading"
    """Changes nothing and makes nothing."""
    GENERATING = "generating"
    ADMIN = "admin"
    """Changes the server, or what others see of it."""


class Refusal(enum.Enum):
    UNKNOWN = 401
    """No key, or one that is none of ours."""
    NOT_ADMIN = 403
    """The API key on a route that needs the admin key."""


ADMIN_REFUSED = "this route changes the server: it needs the admin API key (--admin-api-key)"
KEY_REFUSED = "missing or wrong API key; send `Authorization: Bearer KEY`"


def access_of(kinds: Mapping[str, Access], request: web.Request) -> Access:
    """The kind of a request's route. `kinds` is keyed by path template, or by `METHOD path` where methods of
    one path differ. What it doesn't name is read with GET, and else administration: a route that somebody
    forgot there is closed, not open."""
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else ""
    kind = kinds.get(f"{request.method} {path}") or kinds.get(path)
    if kind is not None:
        return kind
    return Access.READING if request.method in ("GET", "HEAD") or resource is None else Access.ADMIN


def refusal(access: Access, authorization: str) -> Refusal | None:
    """Why the value of an `Authorization` header doesn't open such a route, or None. In constant time as far
    as the keys go."""
    serving = get_serving()
    if access is Access.OPEN:
        return None
    needed = serving.admin_api_key or serving.api_key if access is Access.ADMIN else serving.api_key
    if needed is None:
        return None
    given = _bearer(authorization)
    is_key, is_admin = _is(given, serving.api_key), _is(given, serving.admin_api_key)
    if is_admin or (is_key and needed == serving.api_key):
        return None
    return Refusal.NOT_ADMIN if is_key else Refusal.UNKNOWN


def own_authorization(access: Access) -> str | None:
    """The header by which this process itself asks another server of the same cluster for such a route."""
    serving = get_serving()
    admin = serving.admin_api_key if access is Access.ADMIN else None
    key = admin or serving.api_key
    return None if key is None else f"Bearer {key}"


def _bearer(authorization: str) -> str:
    """The token, or an empty string."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _is(given: str, key: str | None) -> bool:
    if key is None:
        return False
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())
