"""What an engine core's process and the process that uses it say to each other: msgspec structs as MessagePack.

Plain data, nothing that runs. One socket each way; every message is one of the tagged unions below. Times are
time.perf_counter, which on Linux is one clock for all processes.
Owners: async_engine's side makes commands, the core's process makes reports.
Not here: sockets and processes (process_core.py, core_process.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from octavo.engine.events import StepEvent
from octavo.engine.metrics import EngineStats
from octavo.engine.request import EngineRequest
from octavo.engine.scheduler_output import ExecutorInfo
from octavo.outputs import CompletionDelta

# Commands


class AddRequests(msgspec.Struct, tag="add", frozen=True):
    """All of them or none: one that is refused takes the others with it.

    By id: an EngineRequest as `encode_request` made it. Bytes inside bytes, so that whatever they hold, the message
    around them can be read and answered.
    """

    requests: dict[str, bytes]


class Abort(msgspec.Struct, tag="abort", frozen=True):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag="reset", frozen=True):
    pass


class GetEvents(msgspec.Struct, tag="events", frozen=True):
    """Asks for the record of steps, as EventLog.recent; answered by one Events."""

    count: int | None = None
    after: int | None = None


class Close(msgspec.Struct, tag="close", frozen=True):
    pass


Command = AddRequests | Abort | ResetPrefixCache | GetEvents | Close

# Reports


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """`phase`: "download" or "load"; bytes."""

    phase: str
    done: int
    total: int


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The model is loaded. `backend`: what `Ops.describe` says, for people."""

    info: ExecutorInfo
    backend: Mapping[str, Any]
    stats: EngineStats


class StepOutput(msgspec.Struct, tag="step", frozen=True):
    """One for every step, and for commands that no step follows: whoever sent a command and hears nothing knows that
    the core hangs."""

    deltas: list[CompletionDelta]
    #: Commands taken since the start, readable or not.
    handled: int
    #: Nothing is left to compute; the next report answers a command.
    resting: bool
    #: At most ten times a second, and whenever the engine comes to rest.
    stats: EngineStats | None = None


class Rejected(msgspec.Struct, tag="rejected", frozen=True):
    """One request of an AddRequests was refused (code queue_full, duplicate_request_id, ...): none of that message has
    any deltas."""

    request_id: str
    message: str
    param: str | None
    code: str


class Events(msgspec.Struct, tag="recorded", frozen=True):
    events: list[StepEvent]


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The core is about to exit, or was found dead. `final`: starting it again would fail in the same way."""

    reason: str
    final: bool
    #: "model": ModelLoadError; "config": ConfigError; "engine": anything else.
    kind: Literal["model", "config", "engine"] = "engine"


Report = Loading | Ready | StepOutput | Rejected | Events | Failed

_encoder = msgspec.msgpack.Encoder()


def encode(message: Command | Report) -> bytes:
    return _encoder.encode(message)


def encode_request(request: EngineRequest) -> bytes:
    return _encoder.encode(request)


def decode_command(data: bytes) -> Command:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _commands.decode(data)


def decode_report(data: bytes) -> Report:
    """As decode_command."""
    return _reports.decode(data)


def decode_request(data: bytes | msgspec.Raw) -> EngineRequest:
    """As decode_command; SamplingParams checks its fields once more."""
    return _requests.decode(data)


_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_requests: msgspec.msgpack.Decoder[EngineRequest] = msgspec.msgpack.Decoder(EngineRequest)
