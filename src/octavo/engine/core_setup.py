"""CoreSetup: what a core's process is told when it starts, one line of JSON on its standard input.

Plain data, from the caller of ProcessCore alone; no part of it ever comes from a request.
Not here: what the two say to each other afterwards (core_messages.py).
"""

from __future__ import annotations

import msgspec

from octavo.config import EngineConfig

#: Exit status of a core's process whose last report is a Failed.
EXIT_REPORTED = 70


class CoreSetup(msgspec.Struct, frozen=True):
    #: ZeroMQ address where the parent listens, in a directory of its own.
    address: str
    config: EngineConfig
    #: "package.module:function" that makes the EngineParts instead of EngineParts.load, with the same parameters.
    parts_factory: str | None = None
    #: Where Python looks for that module, besides the usual places.
    search_path: list[str] = []


def encode_setup(setup: CoreSetup) -> bytes:
    return msgspec.json.encode(setup) + b"\n"


def decode_setup(line: bytes) -> CoreSetup:
    return msgspec.json.decode(line, type=CoreSetup)
