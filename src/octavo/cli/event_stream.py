"""Server-sent events from an untrusted server: bytes in any pieces, the data of each event out.

Owner of the part of a line that has come so far; nothing larger than MAX_EVENT_BYTES is ever kept.
Not here: the connection and its time limits, what the data mean (remote.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from octavo.errors import OctavoError

#: A whole answer in one event still fits.
MAX_EVENT_BYTES = 1 << 20

_LINE_END = re.compile(rb"\r\n|\n|\r")


def lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a text in `pieces`, without their ends. Raises OctavoError for one that is too long."""
    begun: list[bytes] = []
    size = 0
    for piece in pieces:
        begun.append(piece)
        size += len(piece)
        if b"\n" in piece or b"\r" in piece:
            text = b"".join(begun)
            held = text.endswith(b"\r")  # half of an end of line, perhaps
            *whole, rest = _LINE_END.split(text[:-1] if held else text)
            yield from whole
            begun = [rest + b"\r" if held else rest]
            size = len(begun[0])
        if size > MAX_EVENT_BYTES:
            raise OctavoError(f"the server sent a line of more than {MAX_EVENT_BYTES} bytes")
    yield from _LINE_END.split(b"".join(begun))


def event_data(pieces: Iterable[bytes]) -> Iterator[str]:
    """The `data` of each event that has some. The last one counts even where the stream ends without an empty line."""
    data: list[bytes] = []
    size = 0
    first = True
    for line in lines(pieces):
        line = line.removeprefix(b"\xef\xbb\xbf") if first else line
        first = False
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
            size += len(value) + 1
            if size > MAX_EVENT_BYTES:
                raise OctavoError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
        elif not line and data:
            yield b"\n".join(data).decode("utf-8", "replace")
            data, size = [], 0
    if data:
        yield b"\n".join(data).decode("utf-8", "replace")
