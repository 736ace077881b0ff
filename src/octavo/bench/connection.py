"""HTTP/1.1 for the benchmark: one request on one connection, its reply handed on in the callback in which its bytes arrive.

The parser is C (httptools), and no task wakes up before the reply has ended: on a small machine every microsecond here is
taken from the server that is measured. A connection is used again after a reply that allows it.
Owner of the connections to one server. What comes is not trusted: heads and trailers are bounded, a body is the receiver's to bound.
Not here: what is in a reply (client.py).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import quote, urlsplit

import httptools

from octavo.errors import OctavoError

#: Bytes that may come without any of them being body: of a head, or of trailers.
MAX_HEAD_BYTES = 64 << 10

#: Called once, with the status and the headers by their lower case names.
OnHead = Callable[[int, Mapping[str, str]], None]
#: Called with what one read had of the body, and the time when it came. What it raises ends the request and is raised by `post`.
OnData = Callable[[bytes, float], None]


class CutError(OctavoError):
    """The connection ended before the reply did."""


class Connections:
    """To one server; idle ones are kept and used again. `tls`: for an https URL."""

    def __init__(self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        self._host, self._port = host, parts.port or (443 if tls else 80)
        self._tls = tls
        self._path = quote(parts.path, safe="/%:@!$&'()*+,;=~")
        name = (f"[{host}]" if ":" in host else host) + (f":{parts.port}" if parts.port else "")
        lines = {"host": name, "content-type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, on_head: OnHead, on_data: OnData) -> None:
        """Until the reply has ended. Raises OSError (no connection), CutError, httptools.HttpParserError (no HTTP).

        A kept connection that the server closes without a byte of an answer was given up before the request came: another
        one takes it.
        """
        request = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n".encode("ascii") + body
        while True:
            kept = self._kept()
            connection = kept or await self._connect()
            try:
                await connection.exchange(request, on_head, on_data)
            except CutError:
                if kept is None or kept.answered:
                    raise
            else:
                if connection.is_open:
                    self._idle.append(connection)
                return

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(loop), self._host, self._port, ssl=self._tls)
        return connection


class _Connection(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.is_open = False
        #: Of the exchange that runs, or ran last.
        self.answered = False
        self._in_head = True
        self._ended: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, on_head: OnHead, on_data: OnData) -> None:
        self._on_head, self._on_data = on_head, on_data
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._in_head, self._complete, self.answered, self._idle_bytes = True, False, False, 0
        if not self.is_open:
            raise CutError("the connection was closed at once")
        self._ended = self._loop.create_future()
        self._transport.write(request)
        try:
            await self._ended
        except BaseException:  # in the middle of a reply it is of no more use
            self.abort()
            raise
        finally:
            self._ended = None

    def abort(self) -> None:
        self.is_open = False
        self._transport.abort()

    # Of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._ended is None or self._ended.done():  # nobody asked for this
            return self.abort()
        self.answered = True
        try:
            self._parser.feed_data(data)
            if self._body:
                body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body.clear()
                self._idle_bytes = 0
                self._on_data(body, now)
            elif (grown := self._idle_bytes + len(data)) > MAX_HEAD_BYTES:
                raise ValueError(f"the head of the reply is longer than {MAX_HEAD_BYTES} bytes")
            else:
                self._idle_bytes = grown
        except httptools.HttpParserUpgrade:
            self._end(ValueError("the server wants to speak another protocol"))
        except Exception as error:
            # what a callback raised comes wrapped
            self._end(error.__context__ if isinstance(error, httptools.HttpParserCallbackError) and error.__context__ else error)
        else:
            if self._complete:
                self._end(None)

    def eof_received(self) -> None:
        self.is_open = False

    def connection_lost(self, error: BaseException | None) -> None:
        self.is_open = False
        # a body without a length ends with its connection
        at_end = error is None and not self._in_head and self._headers.keys().isdisjoint(("content-length", "transfer-encoding"))
        self._end(None if at_end else CutError(f"the connection was closed ({error or 'before the end of the reply'})"))

    def _end(self, error: BaseException | None) -> None:
        if self._ended is not None and not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)

    # Of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue and the like: the head of the reply is yet to come
            self._headers.clear()
        else:
            self._in_head = False
            self._on_head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._complete:
            raise ValueError("the server sent more than one reply")
        if not self._in_head:
            self._complete = True
            self.is_open = self.is_open and self._parser.should_keep_alive()
