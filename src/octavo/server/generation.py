"""One POST to /v1/chat/completions or /v1/completions, from its body to the last byte of the reply.

The body is read, not parsed: an input process turns it into requests for the engine, or refuses it. What the engine gives
becomes one JSON object or a stream of events. A client that hangs up cancels whatever is being waited for, and
cancelling the engine's stream aborts the requests in it.
Owner of its record and of the one task that works. Not here: checks (prepare.py), shapes (replies.py), limits (limits.py).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.engine.async_engine import Submission
from octavo.errors import EngineDeadError, InvalidRequestError
from octavo.outputs import CompletionDelta
from octavo.server import sse
from octavo.server.auth import KEY_SCOPE
from octavo.server.envelope import REPLY_HEADERS, REQUEST_ID, SEND_BODY
from octavo.server.errors import ApiError, ClientGone, engine_error, refused
from octavo.server.http_protocol import CUT, IS_PAUSED
from octavo.server.limits import read_body
from octavo.server.prepared import Endpoint, Job, Prepared, Refused
from octavo.server.replies import Head, Json, StreamReply, WholeReply, encode
from octavo.server.request_record import RequestRecord
from octavo.server.state import ServerState

_PREFIX: dict[str, str] = {"chat": "chatcmpl", "completions": "cmpl"}
#: Longest value of X-Octavo-Ignored.
_MAX_IGNORED = 500

Batches = AsyncGenerator[list[CompletionDelta], None]


class Generation(Response):
    """A reply that is made while it is sent."""

    def __init__(self, server: ServerState, endpoint: Endpoint) -> None:
        super().__init__()
        self._server = server
        self._endpoint = endpoint
        self._record = RequestRecord(f"{_PREFIX[endpoint]}-{uuid.uuid4().hex}", endpoint)
        self._scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        record, config = self._record, self._server.config
        record.http_id = scope[REQUEST_ID]
        try:
            self._server.check_accepting()
            # no name here: the answer may take long, and only its beginning needs the body
            work = self._answer(
                await read_body(scope["headers"], receive, int(config.max_body), config.body_timeout, self._server.bodies), send
            )
            await unless_gone(receive, work)
        except ClientGone:
            record.status = 499
            raise
        except ApiError as error:
            self._failed(error)
            raise
        except BaseException:
            record.status = record.status or 500
            raise
        finally:
            self._server.finished(record)

    async def _answer(self, body: bytes, send: Send) -> None:
        server, record = self._server, self._record
        prepared = await server.inputs.prepare(Job(self._endpoint, body, record.request_id, self._scope.get(KEY_SCOPE), record.arrival))
        del body
        if isinstance(prepared, Refused):
            raise refused(prepared)
        record.streamed = prepared.stream
        if prepared.ignored:
            self._scope[REPLY_HEADERS].append((b"x-octavo-ignored", ignored_header(prepared.ignored)))
        submissions = [Submission(prompt.request_id, prepared.n, prompt.request) for prompt in prepared.prompts]
        async with aclosing(server.engine.stream(submissions, server.config.stream_interval)) as batches:
            await (self._stream if prepared.stream else self._whole)(prepared, batches, send)

    async def _whole(self, prepared: Prepared, batches: Batches, send: Send) -> None:
        reply = WholeReply(self._endpoint, prepared, self._head())
        while (batch := await self._next(batches)) is not None:
            reply.add(batch)
            if reply.failure is not None:
                raise reply.failure
        body = encode(reply.body())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        self._record.status = 200
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, {"type": "http.response.body", "body": body})

    async def _stream(self, prepared: Prepared, batches: Batches, send: Send) -> None:
        """An error that comes before the first token gets its own status, a later one is the last event."""
        reply = StreamReply(self._endpoint, prepared, self._head())
        batch = await self._next(batches)
        chunks = reply.add(batch or [])
        if reply.failure is not None:
            raise reply.failure
        self._record.status = 200
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
        send = self._scope[SEND_BODY]
        try:
            while batch is not None:
                if chunks:  # all events of a batch in one piece
                    await self._send(send, {"type": "http.response.body", "body": _events(chunks), "more_body": True})
                if reply.failure is not None:
                    raise reply.failure
                batch = await self._next(batches)
                chunks = reply.add(batch or [])
            last = _events(reply.end()) + sse.DONE
        except ApiError as error:
            self._failed(error)
            last = sse.event(error.body())
        await self._send(send, {"type": "http.response.body", "body": last})

    def _head(self) -> Head:
        return Head(self._record.request_id, int(time.time()))

    async def _next(self, batches: Batches) -> list[CompletionDelta] | None:
        """The next batch, counted; None after the last. Raises ApiError."""
        server = self._server
        try:
            batch = await anext(batches, None)
        except EngineDeadError as error:
            server_is_closing = server.draining or server.engine.state == "closed"
            raise engine_error(EngineDeadError("the server is shutting down") if server_is_closing else error, server.retry_after) from None
        except InvalidRequestError as error:
            raise engine_error(error, server.metrics.retry_after()) from None
        if batch is not None:
            self._record.add(batch, server.metrics.token_latency)
        return batch

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        """Send, unless the client does not take what was sent before."""
        is_paused = self._scope.get(IS_PAUSED)
        if is_paused is not None and not is_paused():  # it will not wait: no timer is needed, as for nearly every event
            return await send(message)
        try:
            async with asyncio.timeout(self._server.config.send_timeout):
                await send(message)
        except TimeoutError:
            if (cut := self._scope.get(CUT)) is not None:
                cut()
            raise ClientGone from None

    def _failed(self, error: ApiError) -> None:
        self._record.status, self._record.code = error.status, error.code


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`; when the client hangs up first, cancel it, wait until it has cleaned up, and raise ClientGone."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _events(chunks: list[Json]) -> bytes:
    return b"".join([sse.event(encode(chunk)) for chunk in chunks])


def ignored_header(names: list[str]) -> bytes:
    """Names of fields for a header: they come from the client, so only plain characters of them, and not too many."""
    shown: list[str] = []
    room = _MAX_IGNORED
    for name in names:
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in name[:64]) or "?"
        room -= len(plain) + 2
        if room < 5:
            shown.append("...")
            break
        shown.append(plain)
    return ", ".join(shown).encode("ascii")
