"""Where the time of one request went, in parts that add up to it, and what would have helped.

The time of a request runs from its arrival to the end of its last step. Each moment of it belongs to one part:
- on its way: before the engine had it; queue: before it was admitted; follow: while a running request computed the beginning that both
  share; preempted: between losing its blocks and its readmission;
- of a step with rows of its own the share that those rows alone would have taken (row_model.py) is its own: a chunk of prefill, the
  parts of decoding, text, or recomputing what a preemption lost. The rest is waiting for others, as is a step that gave it nothing;
- between steps: the engine's own record and the caller, who reads; other: what no part of a step accounts for.
Stateless. Not here: what would have helped (advice.py), printing (report.py).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from octavo.engine.events import EntryEvent, StepEvent
from octavo.engine.scheduler_output import TokenKind
from octavo.errors import OctavoError, shown
from octavo.trace.lives import Life, find_searches, last_time, lives, merged
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
    "follow": "waiting for the same beginning",
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
    """One request among the others of a trace: a choice with the prompt it started from, or a beam search with all its beams."""

    trace: Trace
    all: dict[str, Life]
    life: Life
    #: The request whose prompt it started from, where it is a choice of n.
    parent: Life | None
    model: RowModel
    #: The ids that its rows go by.
    names: set[str]
    is_search: bool = False

    @property
    def preempted(self) -> list[int]:
        """Steps in which what had its rows lost its blocks; of a parent, those before the choice began."""
        begin = self.life.admissions[0][0]
        return sorted(self.life.preempted + [n for n in (self.parent.preempted if self.parent else []) if n < begin])

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
    beams = {beam.request_id: name for name, family in find_searches(case.all).items() for beam in family}
    others = {beams.get(name, name) for name in others}
    finish = case.life.finish
    explanation = Explanation(
        case.life.request_id, last_time(trace, case.life) - first.arrival, found, first.num_prompt_tokens, first.num_found,
        case.life.num_output_tokens, len(case.preempted), len(others), finish.reason if finish else None,
        bool(others) and case.model.shapes < 2,
    )  # fmt: skip
    explanation.claims = claims(case, explanation)
    return explanation


def find(trace: Trace, request_id: str | None) -> Case:
    everything = lives(trace)
    parents = {life.parent for life in everything.values()}
    searches = find_searches(everything)
    beams = {beam.request_id: name for name, family in searches.items() for beam in family}
    known = {
        name: life for name, life in everything.items() if life.complete and life.entries and name not in parents and name not in beams
    }
    known |= {name: merged(searches[name]) for name in searches if everything[name].complete}
    request_id = beams.get(request_id, request_id) if request_id is not None else None
    if request_id is None:
        if not known:
            raise OctavoError("the record holds no request from its beginning on")
        life = max(known.values(), key=lambda one: one.admissions[0][0])
    else:
        name = f"{request_id}#0" if request_id in parents and request_id not in searches else request_id
        if name not in known:
            if name in everything:
                raise OctavoError(f"the record does not hold {shown(request_id)} from its beginning on: record for longer")
            some = ", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else "")
            raise OctavoError(f"the record holds no request {shown(request_id)}; there are: {some or 'none'}")
        life = known[name]
    if life.request_id in searches:
        return Case(trace, everything, life, None, fit(trace), {beam.request_id for beam in searches[life.request_id]}, is_search=True)
    parent = everything.get(life.parent) if life.parent is not None else None
    if life.parent is not None and (parent is None or not parent.complete):
        raise OctavoError(f"the record does not hold the prompt of {life.request_id}: record for longer")
    names = {life.request_id} | ({parent.request_id} if parent is not None else set())
    return Case(trace, everything, life, parent, fit(trace), names)


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


class _Standing:
    """Whether the request has rows, or what it waits for; and how many tokens it computes a second time."""

    def __init__(self, case: Case) -> None:
        self.waits = "queue"
        self._names = case.names
        self._running: set[str] = set()
        self._done: dict[str, int] = {}
        self._lost: dict[str, int] = {}

    def see(self, event: StepEvent, own: list[EntryEvent]) -> None:
        """What the scheduler did in this step. A parent whose choice or beam has begun no longer counts."""
        lost = self._names.intersection(event.preempted)
        for name in lost:
            self._lost[name] = max(self._lost.get(name, 0), self._done.get(name, 0))
        self._running -= lost.union(event.dropped)
        for admission in event.admitted:
            name, parent = admission.request_id, admission.parent
            if name not in self._names:
                continue
            self._running.add(name)
            if parent is not None:
                self._running.discard(parent)
                self._lost.setdefault(name, self._lost.get(parent, 0))
        if self._running or own:
            self.waits = ""
        elif lost:
            self.waits = "preempted"

    def again(self, entry: EntryEvent) -> float:
        """The share of an entry's tokens that had been computed before."""
        stop = entry.start + entry.num_tokens
        self._done[entry.request_id] = stop
        return max(0, min(stop, self._lost.get(entry.request_id, 0)) - entry.start) / entry.num_tokens


def _divide(case: Case) -> dict[str, float]:
    """Seconds by part; their sum is the time of the request, whatever the events say."""
    steps, first = case.trace.steps, case.first.admissions[0][1]
    sums, standing = _Sum(first.arrival), _Standing(case)
    sums.until(first.added, "intake")
    followed = [pair for life in (case.first, case.life) for _, admission in life.admissions for pair in admission.followed]

    def waiting(step: int, part: str) -> str:
        return "follow" if part and any(begin <= step < stop for begin, stop in followed) else part

    began = bisect_left(steps, first.added, key=lambda event: event.time)
    for number in range(min(began, case.span().start), case.span().stop):
        event = steps[number]
        # the time behind a step is that of the wait which went on in it
        sums.until(event.time, waiting(event.step - 1, standing.waits) or "between")
        own = case.own(event)
        standing.see(event, own)
        if own:
            _divide_step(case, event, own, standing, sums)
        else:
            sums.until(end(event), waiting(event.step, standing.waits) or "others")
    return _ordered(sums.parts)


def _divide_step(case: Case, event: StepEvent, own: list[EntryEvent], standing: _Standing, sums: _Sum) -> None:
    share = case.model.share([rows(entry) for entry in own], [rows(entry) for entry in event.entries])
    sums.add("others", seconds(event) * (1 - share))
    tokens = sum(entry.num_tokens for entry in own)
    for entry in own:
        part_of = share * entry.num_tokens / tokens
        again = standing.again(entry)
        chunk = f"prefill {entry.start} {entry.start + entry.num_tokens}" if entry.kind is TokenKind.PROMPT else None
        for name, whole in parts(event).items():
            part = name if name in ("detokenise", "other") else chunk or name
            sums.add("recompute", whole * part_of * again)
            sums.add(part, whole * part_of * (1 - again))
    sums.cursor = end(event)


def _ordered(found: dict[str, float]) -> dict[str, float]:
    """In the order of WORDS, with the chunks of prefill behind the queue; parts that are nothing stay out, but for other."""
    chunks = [name for name in found if name.startswith("prefill ")]
    before = ("intake", "queue", "follow")
    names = [*before, *chunks, *(name for name in WORDS if name not in before)]
    return {name: found[name] for name in names if found[name] or name == "other"}
