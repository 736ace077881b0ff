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
