"""Where the time of one request went, in parts that add up to it, and what would have helped.

The time of a request runs from its arrival to the end of its last step. Each moment of it belongs to one part:
- on its way: before the engine had it; queue: before it was admitted; preempted: between losing its blocks and its readmission;
- of a step with rows of its own the share that those rows alone would have taken (row_model.py) is its own: a chunk of prefill, the
  parts of decoding, text, or recomputing what a preemption lost. The rest is waiting for others, as is a step that gave it nothing;
- between steps: the engine's own record and the caller, who reads; other: what no part of a step accounts for.
Stateless. Not here: what would have helped (advice.py), printing (report.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.events import EntryEvent, StepEvent
from octavo.engine.scheduler_output import TokenKind
from octavo.errors import OctavoError, shown
from octavo.trace.lives import Life, last_time, lives
from octavo.trace.record import Trace, end, parts, seconds
from octavo.trace.row_model import RowModel, fit, rows

#: Parts of a decode step, and how they are called.
DECODE = {
    "schedule": "decode: scheduling",
    "prepare": "decode: preparing the batch",
    "forward": "decode: forward pass",
    "sample": "decode: sampling",
    "update": "decode: bookkeeping",
}
WORDS = {
    "intake": "on its way to the engine",
    "queue": "queue",
    **DECODE,
    "detokenise": "detokenising",
    "others": "waiting for others",
    "preempted": "preempted: waiting to go on",
    "recompute": "preempted: computing again",
    "between": "between steps: the caller",
    "other": "other",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """An estimate of what another run would have saved. `change`: what to do, for programs."""

    words: str
    seconds: float
    change: dict[str, int | str]


@dataclass(slots=True)
class Explanation:
    request_id: str
    total: float
    #: Seconds by part, in the order of WORDS; chunks of prefill are "prefill A B" for tokens A to B - 1.
    parts: dict[str, float]
    num_prompt_tokens: int
    num_found: int
    num_output_tokens: int
    num_preemptions: int
    #: Requests with rows in the same steps.
    num_others: int
    #: Why it ended, or None where the record does not tell.
    reason: str | None
    #: The share of others is a guess: too few kinds of steps to tell what a row costs.
    rough: bool
    claims: list[Claim] = field(default_factory=list)


@dataclass(slots=True)
class Case:
    """One request among the others of a trace."""

    trace: Trace
    all: dict[str, Life]
    life: Life
    #: The request whose prompt it started from, where it is a choice of n.
    parent: Life | None
    model: RowModel

    @property
    def names(self) -> set[str]:
        return {self.life.request_id} | ({self.parent.request_id} if self.parent else set())

    @property
    def first(self) -> Life:
        return self.parent or self.life

    def own(self, event: StepEvent) -> list[EntryEvent]:
        return [entry for entry in event.entries if entry.request_id in self.names]

    def span(self) -> range:
        """Places of the steps from its admission to its last."""
        return range(self.first.admissions[0][0], self.life.last + 1)


def explain(trace: Trace, request_id: str | None = None) -> Explanation:
    """Explain a request, the last one that was admitted by default. Raises OctavoError, saying which there are."""
    from octavo.trace.advice import claims

    case = find(trace, request_id)
    found = _divide(case)
    first = case.first.admissions[0][1]
    others = {entry.request_id for n in case.span() for entry in trace.steps[n].entries} - case.names
    finish = case.life.finish
    explanation = Explanation(
        case.life.request_id, last_time(trace, case.life) - first.arrival, found, first.num_prompt_tokens, first.num_found,
        case.life.num_output_tokens, len(case.life.preempted), len(others), finish.reason if finish else None,
        bool(others) and case.model.shapes < 2,
    )  # fmt: skip
    explanation.claims = claims(case, explanation)
    return explanation


def find(trace: Trace, request_id: str | None) -> Case:
    everything = lives(trace)
    parents = {life.parent for life in everything.values()}
    known = {name: life for name, life in everything.items() if life.complete and life.entries and name not in parents}
    if request_id is None:
        if not known:
            raise OctavoError("the record holds no request from its beginning on")
        life = max(known.values(), key=lambda one: one.admissions[0][0])
    else:
        name = f"{request_id}#0" if request_id in parents else request_id
        if name not in known:
            if name in everything:
                raise OctavoError(f"the record does not hold {shown(request_id)} from its beginning on: record for longer")
            some = ", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else "")
            raise OctavoError(f"the record holds no request {shown(request_id)}; there are: {some or 'none'}")
        life = known[name]
    parent = everything.get(life.parent) if life.parent is not None else None
    if life.parent is not None and (parent is None or not parent.complete):
        raise OctavoError(f"the record does not hold the prompt of {life.request_id}: record for longer")
    return Case(trace, everything, life, parent, fit(trace))


class _Sum:
    """Adds up stretches of time that follow each other."""

    def __init__(self, start: float) -> None:
        self.cursor = start
        self.parts: dict[str, float] = dict.fromkeys(WORDS, 0.0)

    def until(self, time: float, part: str) -> None:
        self.parts[part] += time - self.cursor
        self.cursor = time

    def add(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds


def _divide(case: Case) -> dict[str, float]:
    """Seconds by part; their sum is the time of the request, whatever the events say."""
    steps, first = case.trace.steps, case.first.admissions[0][1]
    sums = _Sum(first.arrival)
    sums.until(first.added, "intake")
    waits, lost, done = "queue", 0, 0
    for number in case.span():
        event = steps[number]
        sums.until(event.time, waits or "between")
        if case.names & set(event.preempted):
            waits, lost = "preempted", max(lost, done)
        if any(admission.request_id in case.names for admission in event.admitted):
            waits = ""
        elif waits:
            sums.until(end(event), waits)
            continue
        own = case.own(event)
        if not own:
            sums.until(end(event), "others")
            continue
        _divide_step(case, event, own, lost, sums)
        done = max(entry.start + entry.num_tokens for entry in own)
    return _ordered(sums.parts)


def _divide_step(case: Case, event: StepEvent, own: list[EntryEvent], lost: int, sums: _Sum) -> None:
    share = case.model.share([rows(entry) for entry in own], [rows(entry) for entry in event.entries])
    sums.add("others", seconds(event) * (1 - share))
    tokens = sum(entry.num_tokens for entry in own)
    again = sum(max(0, min(entry.start + entry.num_tokens, lost) - entry.start) for entry in own) / tokens
    (entry, *_) = own
    chunk = f"prefill {entry.start} {entry.start + entry.num_tokens}" if entry.kind is TokenKind.PROMPT else None
    for name, whole in parts(event).items():
        part = name if name in ("detokenise", "other") else chunk or name
        sums.add("recompute", whole * share * again)
        sums.add(part, whole * share * (1 - again))
    sums.cursor = end(event)


def _ordered(found: dict[str, float]) -> dict[str, float]:
    """In the order of WORDS, with the chunks of prefill behind the queue; parts that are nothing stay out, but for other."""
    chunks = [name for name in found if name.startswith("prefill ")]
    names = ["intake", "queue", *chunks, *(name for name in WORDS if name not in ("intake", "queue"))]
    return {name: found[name] for name in names if found[name] or name == "other"}
