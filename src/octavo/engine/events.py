"""StepEvent: what one step did and why. `trace`, `explain`, metrics and the lab read this one record.

Owner: the engine core keeps the last `event_history` of them in a ring. One object and one small tuple per entry a
step, so it costs well under 1 % of one. Not here: counters (metrics.py), printing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from octavo.engine.scheduler_output import TokenKind

Why = Literal["decode", "starved", "prompt", "new", "resumed", "fork"]


class EntryEvent(NamedTuple):
    """One entry of a step. `why`: decode (one token of a running stream), starved (its turn had come after
    max_stalled_steps), prompt (next chunk), new, resumed (after a preemption), fork (a choice of n)."""

    request_id: str
    start: int
    num_tokens: int
    kind: TokenKind
    why: Why


@dataclass(slots=True)
class StepEvent:
    step: int
    #: time.perf_counter at the start of the step, seconds.
    time: float
    entries: list[EntryEvent] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    blocks_taken: int = 0
    blocks_shared: int = 0
    blocks_copied: int = 0
    blocks_evicted: int = 0
    #: The forward pass was replayed (settings: replay).
    replayed: bool = False
    running: int = 0
    waiting: int = 0
    #: Seconds by part: schedule, execute, update, and what the executor reports of its own.
    timings: dict[str, float] = field(default_factory=dict)


class EventLog:
    """The last events, oldest first."""

    def __init__(self, size: int) -> None:
        self._ring: deque[StepEvent] = deque(maxlen=size)

    def add(self, event: StepEvent) -> None:
        self._ring.append(event)

    def recent(self, count: int | None = None) -> list[StepEvent]:
        events = list(self._ring)
        return events if count is None else events[max(0, len(events) - count) :]
