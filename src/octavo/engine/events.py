"""StepEvent: what one step did and why. `trace`, `explain`, metrics and the lab read this one record.

Owner: the engine core keeps the last `event_history` of them in a ring. One object and one small tuple per entry a
step, so it costs well under 1 % of one (benchmarks/recording_cost.py). No text and no token ids: lengths, times and block
numbers only. Not here: counters (metrics.py), files and pictures made of events (trace/).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from octavo.engine.scheduler_output import TokenKind
from octavo.outputs import FinishReason

Why = Literal["decode", "starved", "prompt", "new", "resumed", "fork"]


class EntryEvent(NamedTuple):
    """One entry of a step. `why`: decode (one token of a running stream), starved (its turn had come after
    max_stalled_steps), prompt (next chunk), new, resumed (after a preemption), fork (a choice of n).
    `blocks`: per KV group, blocks appended to its table before this step; () for none. With `StepEvent.dropped` they
    tell who held which block in which step."""

    request_id: str
    start: int
    num_tokens: int
    kind: TokenKind
    why: Why
    blocks: tuple[tuple[int, ...], ...] = ()


class Admission(NamedTuple):
    """A request left the queue in this step. Times are of the core's clock (time.perf_counter), seconds."""

    request_id: str
    #: The caller's request where this one is a choice of n, else None.
    parent: str | None
    #: When it came to the process that took it in, and when to the engine core.
    arrival: float
    added: float
    num_prompt_tokens: int
    #: Tokens it need not compute: found in the prefix cache, or its parent's.
    num_found: int
    #: After a preemption.
    resumed: bool
    #: Steps [first, end) since it was queued in which it waited for a running request to compute the beginning that both share.
    followed: tuple[tuple[int, int], ...] = ()


class Finish(NamedTuple):
    """A choice ended, in this step or since the one before. Times are time.perf_counter, seconds."""

    request_id: str
    reason: FinishReason
    first_token: float | None
    time: float
    num_output_tokens: int
    num_preemptions: int


@dataclass(slots=True)
class StepEvent:
    step: int
    #: time.perf_counter at the start of the step, seconds.
    time: float
    entries: list[EntryEvent] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    #: The caller's ids, one for each choice that ended; `ends` has more of each.
    finished: list[str] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    ends: list[Finish] = field(default_factory=list)
    #: Requests that have lost their blocks since the step before: ended or preempted.
    dropped: list[str] = field(default_factory=list)
    blocks_taken: int = 0
    blocks_shared: int = 0
    blocks_copied: int = 0
    blocks_evicted: int = 0
    #: Blocks whose last holder let go of them.
    blocks_freed: int = 0
    #: Held after the step, over all KV groups.
    blocks_used: int = 0
    #: The forward pass was replayed (settings: replay).
    replayed: bool = False
    running: int = 0
    waiting: int = 0
    #: Seconds by part: schedule, execute, update; what the executor reports of its own (prepare, forward, sample: parts of
    #: execute); detokenise (part of update: text, stop strings, deltas).
    timings: dict[str, float] = field(default_factory=dict)


class EventLog:
    """The last events, oldest first."""

    def __init__(self, size: int) -> None:
        self._ring: deque[StepEvent] = deque(maxlen=size)

    def add(self, event: StepEvent) -> None:
        self._ring.append(event)

    def recent(self, count: int | None = None, after: int | None = None) -> list[StepEvent]:
        """The last `count`; or with `after`, the first `count` of those whose step is later than that."""
        events = list(self._ring)
        if after is not None:
            first = bisect_right(events, after, key=lambda event: event.step)
            return events[first:] if count is None else events[first : first + count]
        return events if count is None else events[max(0, len(events) - count) :]
