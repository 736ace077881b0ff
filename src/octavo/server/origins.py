"""Which Host names a server answers to, and which web pages may read its answers (CORS): none unless they are listed.

A page of any site can make a browser call a server on loopback, and can give its own name the address 127.0.0.1 (DNS
rebinding) to read the answer. The first is stopped by sending no CORS header, the second by looking at the Host header.
Stateless. Not here: keys (auth.py).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.envelope import REPLY_HEADERS
from octavo.server.errors import ApiError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
METHODS = b"GET, POST, OPTIONS"
HEADERS = b"authorization, content-type, x-request-id"
EXPOSED = b"x-request-id, x-octavo-ignored, retry-after"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def accepted_hosts(listen: str, allowed: Sequence[str]) -> frozenset[str] | None:
    """Names for the Host header, lower case and without a port; None: any, since the name of the machine is not known here."""
    if not is_loopback(listen):
        return frozenset(host_name(name) for name in allowed) or None
    return frozenset(map(host_name, (*LOOPBACK_NAMES, listen if ":" not in listen else f"[{listen}]", *allowed)))


def host_name(value: str) -> str:
    """`Example.org:8000` -> `example.org`, `[::1]:8000` -> `[::1]`."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[: value.find("]") + 1]
    return value.partition(":")[0].removesuffix(".")


class HostMiddleware:
    """Refuses requests for a name that is not ours."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._hosts is not None:
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(given) != 1 or host_name(given[0]) not in self._hosts:
                raise ApiError(403, "this server does not answer to that Host name (setting allowed_hosts)", code="host_not_allowed")
        await self._app(scope, receive, send)


class CorsMiddleware:
    """Says to listed origins, and to no other, that they may read the answer. A preflight is answered here, without a key."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin")
        if origin not in self._origins or origin is None:
            return await self._app(scope, receive, send)
        added: list[tuple[bytes, bytes]] = scope[REPLY_HEADERS]
        added += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED), (b"vary", b"Origin")]
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            added += [(b"access-control-allow-methods", METHODS), (b"access-control-allow-headers", HEADERS)]
            await send({"type": "http.response.start", "status": 204, "headers": [(b"access-control-max-age", b"600")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)
