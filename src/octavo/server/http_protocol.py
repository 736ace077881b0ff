"""The HTTP/1.1 connection: uvicorn's, with bounds on the head of a request and a way to cut a connection.

uvicorn has no limit on the size of headers and on the time they take, answers broken HTTP with plain text, and tells of
requests that were sent ahead only the last one that the client has hung up.
Owner of one timer a connection. Not here: bodies (limits.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from octavo.server.errors import ApiError

MAX_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 20.0
#: Seconds a refused client has for noticing, while what it still sends is dropped: closing at once could take the answer from it.
LINGER_SECONDS = 1.0
#: Requests that may be sent ahead, before the answer to the first of them has ended.
MAX_PIPELINED = 8
#: Scope entry: a function that drops the connection, unsent data and all.
CUT = "octavo.cut"
#: Scope entry: a function that says whether the next send would wait, because the client has not taken what was sent before.
IS_PAUSED = "octavo.is_paused"


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Received since the last piece of a body, or since the request began: heads, trailers, the lines between chunks.
        self._head_bytes = 0
        #: The request that is being answered; `cycle` is the last one that has come.
        self._running: RequestResponseCycle | None = None
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._hang_up()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._head_bytes += len(data)
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_timer()  # whatever this is, the next request has begun
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes", code="headers_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._start_timer()
        self.scope[CUT] = self.transport.abort  # type: ignore[literal-required]
        self.scope[IS_PAUSED] = lambda: self.flow.write_paused  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self._hang_up()
            self.transport.close()
        elif self.pipeline:  # uvicorn stops reading here, and would not see the client hang up during the answer before
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _hang_up(self) -> None:
        """Let the request that is being answered know that nobody waits for it."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not valid HTTP", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer what no request could be made of, and close. In the middle of another answer there is only closing."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            if cycle is not None and not cycle.response_complete:  # the rest of its body will not come
                cycle.disconnected = True
                cycle.message_event.set()
            body = error.body()
            head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in head)
            self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
            self.transport.write_eof()
            self._refused = True
            self._start_timer(LINGER_SECONDS)
        else:
            self.transport.close()

    def _start_timer(self, seconds: float = HEAD_SECONDS) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(seconds, self._close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
