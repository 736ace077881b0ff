"""What goes wrong with a request, as an HTTP status and an OpenAI error object: {"error": {message, type, param, code}}.

Stateless. Not here: what a body may hold (prepare.py), the shape of replies (replies.py), who catches these (envelope.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import EngineDeadError, InvalidRequestError
from octavo.server.prepared import Refused

#: Statuses that say something else than "your request is wrong" or "we failed".
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
#: What a refusal of the engine's means in HTTP; everything else is a 400.
_STATUS = {"queue_full": 429}


class ApiError(Exception):
    """Raised anywhere below the envelope; it becomes the reply, or the last event of a stream that has begun."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        """`retry_after`: seconds. `close`: the connection cannot be used again, because the request was not read to its end."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.close, self._headers = retry_after, close, headers

    def body(self) -> bytes:
        """The error object as one line of JSON."""
        return msgspec.json.encode({"error": error_object(self.status, self.message, self.param, self.code)})

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = [(b"content-type", b"application/json"), *self._headers]
        if self.retry_after is not None:
            found.append((b"retry-after", b"%d" % self.retry_after))
        if self.close:
            found.append((b"connection", b"close"))
        return found


class ClientGone(Exception):
    """The client has hung up: there is nobody to answer."""


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": message, "type": kind, "param": param, "code": code}


def refused(refusal: Refused) -> ApiError:
    """What the input side found."""
    busy = refusal.status in (429, 503)
    return ApiError(refusal.status, refusal.message, param=refusal.param, code=refusal.code, retry_after=1 if busy else None)


def engine_error(error: InvalidRequestError | EngineDeadError, retry_after: int) -> ApiError:
    """What the engine found. `retry_after`: seconds, for those that pass by themselves."""
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_unavailable", retry_after=retry_after)
    status = _STATUS.get(error.code, 400)
    return ApiError(status, str(error), param=error.param, code=error.code, retry_after=retry_after if status == 429 else None)
