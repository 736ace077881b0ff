"""Server-sent events: how a line of JSON becomes an event, and the headers of a stream.

Stateless. Not here: what is in the events (replies.py), when they are sent (generation.py).
"""

from __future__ import annotations

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"

# JSON escapes the other characters that some clients take for the end of a line.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def event(data: bytes) -> bytes:
    """One event from one line of JSON in UTF-8 (these bytes occur in it only inside of strings)."""
    for raw, escaped in _LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"
