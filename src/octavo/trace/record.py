"""Trace: the events of a run with what one must know to read them, and the file it is kept in.

A file is one JSON object (`*.octrace.json`) with `format` and `version`; times are seconds of one clock. It holds request ids,
lengths, times and block numbers; text only where `texts` was filled (`--with-text`), token ids never.
Plain data. Not here: what is read out of it (lives.py, explain.py), pictures (perfetto.py, html.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import octavo
from octavo.engine.events import Admission, Finish, StepEvent
from octavo.errors import OctavoError, shown

FORMAT, VERSION = "octavo-trace", 1
#: A file beyond this is not read.
MAX_BYTES = 1 << 30
#: Counts of tokens and limits of a step lie below this.
MOST = 1 << 31
#: Parts of a step that follow each other (the engine's names), and those that lie inside one of them.
OUTER = ("schedule", "execute", "update")
INNER = {"prepare": "execute", "forward": "execute", "sample": "execute", "detokenise": "update"}


@dataclass(slots=True)
class Settings:
    """Limits of a step that the engine ran under; None where they are not known (a server's)."""

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_prefill_batch_size: int | None = None
    max_decode_batch_size: int | None = None


@dataclass(slots=True)
class Text:
    prompt: str
    answer: str


@dataclass(slots=True)
class Trace:
    steps: list[StepEvent]
    model: str = ""
    #: Tokens in a block, and blocks of the pool in each KV group.
    block_size: int = 16
    num_blocks: list[int] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)
    #: By request id; only where it was asked for.
    texts: dict[str, Text] = field(default_factory=dict)
    #: Steps before the run, of known shapes, so that it is known what a row costs; nothing of any request.
    calibration: list[StepEvent] = field(default_factory=list)
    #: Steps were lost between two of these, or before the first.
    gaps: bool = False
    version: int = VERSION
    format: str = FORMAT
    octavo: str = octavo.__version__


def seconds(event: StepEvent) -> float:
    """How long a step took, all its parts together."""
    return sum(event.timings.get(part, 0.0) for part in OUTER)


def parts(event: StepEvent) -> dict[str, float]:
    """The same, divided without overlap: inner parts by their names, what is left of execute as "other" and of update as "update"."""
    found = {name: event.timings.get(name, 0.0) for name in ("schedule", *INNER)}
    for outer, rest in (("execute", "other"), ("update", "update")):
        inner = sum(found[name] for name, of in INNER.items() if of == outer)
        found[rest] = event.timings.get(outer, 0.0) - inner
    return found


def end(event: StepEvent) -> float:
    return event.time + seconds(event)


def write(trace: Trace, path: Path) -> None:
    path.write_bytes(msgspec.json.encode(trace) + b"\n")


def read(path: Path) -> Trace:
    """Raises OctavoError for a file that is no trace, damaged, or of another version."""
    with path.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OctavoError(f"{path} is larger than {MAX_BYTES >> 30} GiB: record fewer steps")
    return decode(data, str(path))


def decode(data: bytes, name: str) -> Trace:
    """A Trace of the bytes of a file or an answer. Raises OctavoError."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise OctavoError(f"{name} is not a trace (octavo trace writes them)")
        if head.version != VERSION:
            raise OctavoError(f"{name} is a trace of version {shown(head.version)}, this program reads version {VERSION}: record it again")
        trace = msgspec.json.decode(data, type=Trace)
    except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is one
        raise OctavoError(f"{name} is not a trace, or it is damaged: {' '.join(str(error).split())}") from None
    check(trace, name)
    return trace


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def check(trace: Trace, name: str) -> None:
    """What arithmetic and pictures rely on. JSON has no infinities or NaN, so numbers are finite unless they overflow."""
    last = float("-inf")
    if not all(limit is None or 0 < limit < MOST for limit in _limits(trace.settings)):
        raise OctavoError(f"{name} is damaged: its settings are impossible")
    for event in [*trace.calibration, *trace.steps]:
        numbers = [event.time, *event.timings.values()]
        if not all(abs(number) < 1e12 for number in numbers) or event.time < last or min(event.timings.values(), default=0.0) < 0:
            raise OctavoError(f"{name} is damaged: step {event.step} has an impossible time")
        last = event.time
        for entry in event.entries:
            blocks = (block for group in entry.blocks for block in group)
            if not (0 < entry.num_tokens < MOST and 0 <= entry.start < MOST and all(-1 <= block < 1 << 24 for block in blocks)):
                raise OctavoError(f"{name} is damaged: step {event.step} has an impossible entry")
        counts = [event.step, event.running, event.waiting, event.blocks_used, event.blocks_freed, event.blocks_evicted]
        if not all(0 <= count < 1 << 53 for count in [*counts, event.blocks_taken, event.blocks_shared, event.blocks_copied]):
            raise OctavoError(f"{name} is damaged: step {event.step} has an impossible count")
        if not (all(map(_possible_admission, event.admitted)) and all(map(_possible_finish, event.ends))):
            raise OctavoError(f"{name} is damaged: step {event.step} has an impossible beginning or end of a request")
    if not 0 < trace.block_size < MOST or len(trace.num_blocks) > 64 or not all(0 < count < 1 << 24 for count in trace.num_blocks):
        raise OctavoError(f"{name} is damaged: its pool is impossible")


def _limits(settings: Settings) -> tuple[int | None, ...]:
    return settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_prefill_batch_size, settings.max_decode_batch_size


def _possible_admission(admission: Admission) -> bool:
    times = abs(admission.arrival) < 1e12 and abs(admission.added) < 1e12
    steps = len(admission.followed) <= 64 and all(0 <= first <= end < 1 << 53 for first, end in admission.followed)
    return times and steps and 0 < admission.num_prompt_tokens < MOST and 0 <= admission.num_found < MOST


def _possible_finish(finish: Finish) -> bool:
    times = abs(finish.time) < 1e12 and abs(finish.first_token or 0.0) < 1e12
    return times and 0 <= finish.num_output_tokens < MOST and 0 <= finish.num_preemptions < MOST


class Piece(msgspec.Struct):
    """One answer of a server's /v1/octavo/steps."""

    object: str
    model: str
    block_size: int
    num_blocks: list[int]
    restarts: int
    steps: list[StepEvent]


def decode_piece(data: bytes, name: str) -> Piece:
    """Raises OctavoError."""
    try:
        return msgspec.json.decode(data, type=Piece)
    except (msgspec.DecodeError, RecursionError):
        raise OctavoError(f"{name} is no Octavo server, or of another version: its answer cannot be read") from None
