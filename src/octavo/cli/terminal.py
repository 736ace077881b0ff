"""Text in and out: standard input, terminals and pipes, their encodings, Ctrl-C.

Stateless but for `Interrupt`, which owns the SIGINT handler while it is open.
Not here: what is written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any, TextIO

from octavo.errors import ConfigError

#: More than any context holds; a bound before the memory is taken.
MAX_INPUT_BYTES = 64 << 20

# C0 and C1 controls but newline and tab: on a terminal they could move the cursor, retitle the window or worse.
_CONTROLS = {code: 0xFFFD for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def tolerant_streams() -> None:
    """Make standard output and error take any text, whatever their encoding: a '?' is better than a lost answer."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def dim(text: str, stream: TextIO) -> str:
    """Faint on a terminal that has colours, unchanged elsewhere (NO_COLOR and TERM=dumb are respected)."""
    plain = not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("", "dumb")
    return text if plain else f"\x1b[2m{text}\x1b[0m"


def write(text: str, stream: TextIO | None = None) -> None:
    """Write and flush. What a model said is shown on a terminal without its control characters, and piped unchanged."""
    stream = sys.stdout if stream is None else stream
    if stream is None:  # started with standard output closed
        return
    stream.write(text.translate(_CONTROLS) if is_terminal(stream) else text)
    stream.flush()


def as_json(value: Any) -> str:
    """One line of JSON that standard output can hold without loss."""
    unicode = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    return json.dumps(value, ensure_ascii=not unicode, allow_nan=False) + "\n"


def note(text: str, stream: TextIO | None = None) -> None:
    """One faint line about the program itself; on standard error unless said otherwise."""
    stream = sys.stderr if stream is None else stream
    if stream is not None:
        stream.write(dim(text.translate(_CONTROLS), stream) + "\n")
        stream.flush()


def check_text(text: str, name: str) -> str:
    """`text`, or ConfigError where it is empty or (an argument in another encoding) no Unicode.

    Under a locale without UTF-8 Python keeps an argument's other bytes as surrogates; they are put together again.
    """
    try:
        text = text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise ConfigError(f"{name} is not valid UTF-8") from None
    if not text.strip():
        raise ConfigError(f"{name} is empty")
    return text


def read_input(name: str = "standard input") -> str:
    """All of standard input without its last newline. Raises ConfigError when it is closed, too long, empty or no UTF-8."""
    if sys.stdin is None or sys.stdin.closed:
        raise ConfigError(f"{name} is closed")
    data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise ConfigError(f"{name} is longer than {MAX_INPUT_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not valid UTF-8 (byte {error.start})") from None
    return check_text(text.removesuffix("\n").removesuffix("\r"), name)


class Interrupt:
    """While open, the first Ctrl-C only sets `seen`, so that the engine finishes its step; a second one raises.

    Without this a KeyboardInterrupt could leave the engine half-way through a step.
    """

    def __init__(self) -> None:
        self.seen = False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
