"""API keys: who may call what. Deny by default: what is not listed as open needs a key, known route or not.

Owner of the keys, as digests only. Not here: hosts and origins (origins.py).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import ConfigError
from octavo.server.errors import ApiError
from octavo.server_config import ServerConfig

_log = logging.getLogger("octavo.server")

#: Exact paths that answer without a key, and only to GET and HEAD. None of them tells anything about a request.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version"})
MAX_FILE_CHARS = 1 << 16
#: Where the scope says which key was used.
KEY_SCOPE = "octavo.key_scope"


class Keys:
    """The keys a server accepts. Compared as digests of equal length, all of them each time: the time taken tells nothing."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._secret = os.urandom(32)
        self._digests = [self._digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def scope_of(self, authorization: bytes) -> str | None:
        """A name for the key in an Authorization header, for the prefix cache and the queue alone; None if it is no key of ours."""
        scheme, _, token = authorization.partition(b" ")
        digest = self._digest(token.strip() if scheme.lower() == b"bearer" else b"")
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex()[:16] if any(matches) else None

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, hashlib.sha256)


def read_keys(config: ServerConfig) -> list[str]:
    """The keys of the settings and of the file. Raises ConfigError: a key that cannot be read must not open the server."""
    keys = list(config.api_key)
    if config.api_key_file is not None:
        keys += _read_file(config.api_key_file)
    if any(not key.isprintable() or " " in key for key in keys):
        raise ConfigError("an API key holds a space or a control character: no client could send it")
    return keys


def _read_file(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_FILE_CHARS + 1)
    except OSError as error:
        raise ConfigError(f"api_key_file {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file {path}: is not UTF-8 text") from None
    if len(text) > MAX_FILE_CHARS:
        raise ConfigError(f"api_key_file {path}: is too large, it should hold one key a line")
    if mode & 0o077:
        _log.warning("api_key_file %s: other users of this machine may read it (chmod 600)", path)
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file {path}: holds no key")
    return keys


class AuthMiddleware:
    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        is_open = scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] in OPEN_PATHS
        if self._keys and not is_open:
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            key_scope = self._keys.scope_of(given[0]) if len(given) == 1 else None
            if key_scope is None:
                raise _unauthorized(bool(given))
            scope[KEY_SCOPE] = key_scope
        await self._app(scope, receive, send)


def _unauthorized(given: bool) -> ApiError:
    wrong = "the API key is wrong" if given else "an API key is needed"
    message = f"{wrong}: send it as 'Authorization: Bearer KEY'"
    return ApiError(401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))
