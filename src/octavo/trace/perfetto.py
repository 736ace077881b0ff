"""A trace in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

One process for the engine (steps and their parts, counters) and one for the requests (a row each: queue, prefill, decode,
preempted). A flow leads through the steps of each request. Times are microseconds from the first event.
Format: "Trace Event Format" (Google, 2016). Stateless.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from octavo.engine.events import EntryEvent, StepEvent
from octavo.engine.scheduler_output import TokenKind
from octavo.trace.lives import Life, lives
from octavo.trace.record import INNER, OUTER, Trace, end, seconds

ENGINE, REQUESTS = 1, 2
Event = dict[str, Any]


def chrome_trace(trace: Trace) -> dict[str, Any]:
    found = list(lives(trace).values())
    begins = [trace.steps[0].time] if trace.steps else [0.0]
    begins += [life.arrival for life in found if life.complete]
    clock = _Clock(min(begins))
    events = [*_names(found), *_steps(trace, clock), *_counters(trace, clock)]
    for row, life in enumerate(found, 1):
        events += _life(trace, life, row, clock)
    about = {"model": trace.model, "octavo": trace.octavo, "steps": len(trace.steps)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


class _Clock:
    def __init__(self, zero: float) -> None:
        self._zero = zero

    def at(self, time: float) -> float:
        return round(max(0.0, time - self._zero) * 1e6, 3)

    def slice(self, name: str, pid: int, tid: int, begin: float, stop: float, **args: Any) -> Event:
        start = self.at(begin)
        length = round(max(0.0, self.at(stop) - start), 3)
        return {"ph": "X", "name": name, "cat": "octavo", "pid": pid, "tid": tid, "ts": start, "dur": length, "args": args}


def _names(found: list[Life]) -> Iterator[Event]:
    for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_name", "pid": ENGINE, "tid": 1, "args": {"name": "steps"}}
    for row, life in enumerate(found, 1):
        yield {"ph": "M", "name": "thread_name", "pid": REQUESTS, "tid": row, "args": {"name": life.request_id}}


def _steps(trace: Trace, clock: _Clock) -> Iterator[Event]:
    for event in trace.steps:
        about = {
            "requests": len(event.entries),
            "tokens": sum(entry.num_tokens for entry in event.entries),
            "replayed": event.replayed,
            "blocks": {name: getattr(event, f"blocks_{name}") for name in ("taken", "shared", "copied", "evicted", "freed")},
            "preempted": event.preempted,
        }
        yield clock.slice(f"step {event.step}", ENGINE, 1, event.time, end(event), **about)
        at = event.time
        for outer in OUTER:
            stop = at + event.timings.get(outer, 0.0)
            yield clock.slice(outer, ENGINE, 1, at, stop)
            yield from _inside(event, outer, at, stop, clock)
            at = stop


def _inside(event: StepEvent, outer: str, begin: float, stop: float, clock: _Clock) -> Iterator[Event]:
    """The parts of a part, one after the other from its beginning: only how long each took was recorded."""
    at = begin
    for name in (name for name, of in INNER.items() if of == outer and event.timings.get(name)):
        until = min(stop, at + event.timings[name])
        yield clock.slice(name, ENGINE, 1, at, until)
        at = until


def _counters(trace: Trace, clock: _Clock) -> Iterator[Event]:
    def counter(name: str, time: float, **values: float) -> Event:
        return {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": clock.at(time), "args": values}

    for event in trace.steps:
        yield counter("requests", event.time, running=event.running, waiting=event.waiting)
        yield counter("KV blocks in use", event.time, blocks=event.blocks_used)
        yield counter("tokens in the step", event.time, tokens=sum(entry.num_tokens for entry in event.entries))


def _life(trace: Trace, life: Life, row: int, clock: _Clock) -> Iterator[Event]:
    yield from _waits(trace, life, row, clock)
    last = len(life.entries) - 1
    for place, (number, entry) in enumerate(life.entries):
        event = trace.steps[number]
        yield clock.slice(_what(entry), REQUESTS, row, event.time, end(event), step=event.step, why=entry.why, tokens=entry.num_tokens)
        if last > 0:  # a flow needs two ends; it binds to the step that encloses its time
            flow = {"name": life.request_id, "cat": "request", "id": row, "pid": ENGINE, "tid": 1}
            kind = {"ph": "s"} if place == 0 else {"ph": "f", "bp": "e"} if place == last else {"ph": "t"}
            yield {**flow, **kind, "ts": clock.at(event.time + seconds(event) / 2)}
    if life.finish is not None:
        args = {"reason": life.finish.reason, "tokens": life.finish.num_output_tokens}
        mark = {"ph": "i", "name": "finished", "cat": "octavo", "pid": REQUESTS, "tid": row, "s": "t"}
        yield {**mark, "ts": clock.at(life.finish.time), "args": args}


def _waits(trace: Trace, life: Life, row: int, clock: _Clock) -> Iterator[Event]:
    if life.complete and life.parent is None:
        yield clock.slice("queue", REQUESTS, row, life.arrival, trace.steps[life.admissions[0][0]].time)
    for number in life.preempted:
        again = next((step for step, _ in life.admissions if step > number), life.last)
        yield clock.slice("preempted", REQUESTS, row, trace.steps[number].time, trace.steps[again].time)


def _what(entry: EntryEvent) -> str:
    if entry.kind is TokenKind.PROMPT:
        return f"prefill {entry.start} to {entry.start + entry.num_tokens - 1}"
    return "decode" if entry.num_tokens == 1 else f"recompute {entry.start} to {entry.start + entry.num_tokens - 1}"
