"""Lives: what happened to each request of a trace, in order of time, put together from the steps.

Stateless. A choice of n > 1 is a life of its own; the request it came from computed the prompt and is another.
Not here: where its time went (explain.py), whose blocks those were (blocks.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.events import Admission, EntryEvent, Finish
from octavo.trace.record import Trace, end


@dataclass(slots=True)
class Life:
    """Numbers of steps are places in `Trace.steps`."""

    request_id: str
    #: The first is when it left the queue for the first time, the others after preemptions: (step, what).
    admissions: list[tuple[int, Admission]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    entries: list[tuple[int, EntryEvent]] = field(default_factory=list)
    finish: Finish | None = None
    #: Where it is seen last.
    last: int = 0

    @property
    def parent(self) -> str | None:
        return self.admissions[0][1].parent if self.admissions else None

    @property
    def complete(self) -> bool:
        """The record holds it from its arrival on."""
        return bool(self.admissions) and not self.admissions[0][1].resumed

    @property
    def arrival(self) -> float:
        return self.admissions[0][1].arrival

    @property
    def num_prompt_tokens(self) -> int:
        return self.admissions[0][1].num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """As far as the record goes."""
        return self.finish.num_output_tokens if self.finish is not None else sum(entry.why == "decode" for _, entry in self.entries)


def lives(trace: Trace) -> dict[str, Life]:
    """By request id, in order of appearance."""
    found: dict[str, Life] = {}

    def of(name: str, step: int) -> Life:
        life = found.setdefault(name, Life(name))
        life.last = step
        return life

    for number, event in enumerate(trace.steps):
        for name in event.preempted:
            of(name, number).preempted.append(number)
        for admission in event.admitted:
            life = of(admission.request_id, number)
            if life.finish is not None:  # an id used again: the earlier one goes by another name
                found[f"{admission.request_id} (until step {trace.steps[life.last].step})"] = found.pop(admission.request_id)
                life = of(admission.request_id, number)
            life.admissions.append((number, admission))
        for entry in event.entries:
            of(entry.request_id, number).entries.append((number, entry))
        for finish in event.ends:
            if finish.request_id in found:
                life = found[finish.request_id]
                life.finish = finish
                if life.last < number and finish.time >= event.time:
                    life.last = number
    return found


def last_time(trace: Trace, life: Life) -> float:
    """The end of the last step that it is seen in."""
    return end(trace.steps[life.last])


def find_searches(everything: dict[str, Life]) -> dict[str, list[Life]]:
    """The beam searches: by the id of the request, its own life and those of all beams. Unlike the choices of n > 1, beams go on from
    beams, and the request itself has an end."""
    families: dict[str, list[Life]] = {}
    deep: set[str] = set()
    for life in everything.values():
        root, seen = life, {life.request_id}
        while (parent := everything.get(root.parent or "")) is not None and parent.request_id not in seen:
            root = parent
            seen.add(root.request_id)
        families.setdefault(root.request_id, []).append(life)
        if len(seen) > 2:
            deep.add(root.request_id)
    roots = {name for name in families if everything[name].parent is None and (name in deep or everything[name].finish is not None)}
    return {name: family for name, family in families.items() if name in roots and len(family) > 1}


def merged(family: list[Life]) -> Life:
    """A beam search as one life: the rows of all its beams."""
    root = next(life for life in family if life.parent is None)
    entries = sorted((pair for life in family for pair in life.entries), key=lambda pair: pair[0])
    preempted = sorted(number for life in family for number in life.preempted)
    made = Life(root.request_id, root.admissions, preempted, entries, root.finish, max(life.last for life in family))
    if made.finish is not None:
        made.last = root.last
        if not made.finish.num_output_tokens:  # the longest beam
            length = max((entry.start + entry.num_tokens for _, entry in entries), default=0) + 1 - root.num_prompt_tokens
            made.finish = made.finish._replace(num_output_tokens=max(0, length))
    return made
