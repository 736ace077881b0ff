"""What every reply has, whatever made it: an X-Request-Id, and an OpenAI error object where something went wrong.

The outermost layer, plain ASGI. What is raised below becomes the reply here; a traceback never leaves the process, and
goes to the log only with --debug, because the text of an exception may hold a part of somebody's prompt.
Owner of the scope's REQUEST_ID and REPLY_HEADERS. Not here: which errors there are (errors.py).
"""

from __future__ import annotations

import logging
import re
import traceback
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import ApiError, ClientGone

#: Scope entries: the id of this exchange (safe to log and to send), a list of headers that any layer may add to, and the way
#: around all layers for the body of a reply whose head has gone through them: a stream would go through them for each token.
REQUEST_ID = "octavo.request_id"
REPLY_HEADERS = "octavo.reply_headers"
SEND_BODY = "octavo.send_body"

_log = logging.getLogger("octavo.server")
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")


class EnvelopeMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = scope[REQUEST_ID] = _request_id(scope)
        added = scope[REPLY_HEADERS] = [(b"x-request-id", request_id.encode())]
        scope[SEND_BODY] = send
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientGone:
            return
        except ApiError as error:
            failure = error
        except Exception as error:
            failure = _unexpected(request_id, error)
        else:
            return
        if not started:
            await send_error(failure, send_with_headers)


async def send_error(error: ApiError, send: Send) -> None:
    body = error.body()
    headers = [*error.headers(), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _request_id(scope: Scope) -> str:
    """The client's own id where it is harmless, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SAFE_ID.fullmatch(value):
            return str(value, "ascii")
    return f"req-{uuid.uuid4().hex}"


def _unexpected(request_id: str, error: Exception) -> ApiError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    _log.error("%s: internal error: %s at %s:%s", request_id, type(error).__name__, frame.filename, frame.lineno)
    _log.debug("%s", request_id, exc_info=error)
    return ApiError(500, f"internal error (request {request_id}); the server's log says where", code="internal_error")
