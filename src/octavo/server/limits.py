"""How a request body is read: no more of it than allowed, in no more time than allowed, as JSON that is not compressed.

Stateless but for the Budget that all bodies of a server share.
Not here: what is in the body (an input process looks at that, see input_pool.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import Receive

from octavo.server.errors import ApiError, ClientGone

Headers = Sequence[tuple[bytes, bytes]]

#: A client that is still sending a body far too large would not read our answer: this many times the limit is taken and thrown away first.
DISCARD_FACTOR = 4
DISCARD_SECONDS = 5.0


class Budget:
    """Bytes that all bodies which are being read may take together: each alone is bounded, their number is not."""

    def __init__(self, most: int) -> None:
        self.left = most


async def read_body(headers: Headers, receive: Receive, max_bytes: int, timeout: float, budget: Budget) -> bytes:
    """The whole body. Raises ApiError (400, 408, 413, 415, 429) or ClientGone. Its memory is bounded by `max_bytes` and one chunk."""
    length = check_headers(headers)
    if length is not None and length > max_bytes:
        if length <= DISCARD_FACTOR * max_bytes and not _values(headers, b"expect"):
            await _discard(receive, length)
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = taken = 0
    try:
        async with asyncio.timeout(timeout):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk, more = message.get("body", b""), message.get("more_body", False)
                size += len(chunk)
                if size > max_bytes:
                    chunks.clear()
                    if more:
                        await _discard(receive, DISCARD_FACTOR * max_bytes - size)
                    raise _too_large(max_bytes)
                if len(chunk) > budget.left:
                    chunks.clear()
                    if more:
                        await _discard(receive, max_bytes - size)
                    advice = "too many large requests are being sent: try again in a moment"
                    raise ApiError(429, advice, code="input_queue_full", retry_after=1, close=True)
                budget.left -= len(chunk)
                taken += len(chunk)
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"the request body did not arrive within {timeout:g} s", code="body_timeout", close=True) from None
    finally:
        budget.left += taken
    return b"".join(chunks)


def check_headers(headers: Headers) -> int | None:
    """Content-Length, if there is one. Raises ApiError for a body that is not plain JSON."""
    encodings = _values(headers, b"content-encoding")
    if any(encoding.strip().lower() not in (b"", b"identity") for encoding in encodings):
        raise ApiError(415, "compressed request bodies are not accepted: send plain JSON", code="unsupported_encoding", close=True)
    for kind in _values(headers, b"content-type"):
        media = kind.partition(b";")[0].strip().lower()
        if media not in (b"", b"application/json"):
            raise ApiError(415, "the body must be JSON: send 'Content-Type: application/json'", code="unsupported_media_type", close=True)
    lengths = _values(headers, b"content-length")
    if not lengths:
        return None
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
        raise ApiError(400, "Content-Length must be one number", code="invalid_content_length", close=True)
    return int(lengths[0])


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


def _too_large(max_bytes: int) -> ApiError:
    message = f"the request body is larger than {max_bytes} bytes (setting max_body)"
    return ApiError(413, message, code="body_too_large", close=True)


async def _discard(receive: Receive, most: int) -> None:
    """Take and drop up to `most` bytes, so that the client gets to reading the refusal."""
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while most > 0:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                most -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
