"""Traces with exact times: a scripted clock, and a scheduler's steps written down by hand or run on the fake model.

`COST` is a cost that is linear in the rows of a step, so that every share can be computed by hand.
"""

from __future__ import annotations

from octavo.engine.events import Admission, EntryEvent, Finish, StepEvent
from octavo.engine.scheduler_output import TokenKind
from octavo.trace.record import Settings, Trace

P, G = TokenKind.PROMPT, TokenKind.GENERATED
#: Seconds of the forward pass: a step, a generated row, a prompt row.
FIXED, GENERATED, PROMPT = 4.0, 1.0, 0.5


def forward(entries: list[EntryEvent]) -> float:
    rows = [(entry.num_tokens, entry.kind) for entry in entries]
    return FIXED + sum(count * (GENERATED if kind is G else PROMPT) for count, kind in rows)


class Script:
    """Builds a trace step by step. Every step: schedule 1/16 of the forward pass, sample 1/8, text 1/16, the rest nothing."""

    def __init__(self, start: float = 100.0, gap: float = 0.25) -> None:
        self.now = start
        self.gap = gap
        self.steps: list[StepEvent] = []

    def step(self, *entries: tuple, admitted=(), preempted=(), ends=(), dropped=()) -> StepEvent:
        made = [EntryEvent(*entry) for entry in entries]
        seconds = forward(made) if made else 2.0
        timings = {
            "schedule": seconds / 16, "execute": seconds * 9 / 8, "update": seconds / 16,
            "forward": seconds, "sample": seconds / 8, "prepare": 0.0, "detokenise": seconds / 16,
        }  # fmt: skip
        event = StepEvent(len(self.steps) + 1, self.now, made, list(preempted), timings=timings, replayed=True)
        event.admitted, event.dropped = list(admitted), list(dropped)
        self.now += seconds * 1.25 if made else 2.0 * 1.25
        event.ends = [Finish(name, "length", None, self.now, count, 0) for name, count in ends]
        event.running = len(made)
        self.steps.append(event)
        self.now += self.gap
        return event

    def trace(self) -> Trace:
        return Trace(self.steps, "scripted", 4, [64], Settings(512, 64, 16, 64))


def admission(name: str, arrival: float, prompt: int, found: int = 0, *, added: float | None = None, resumed: bool = False) -> Admission:
    return Admission(name, None, arrival, arrival if added is None else added, prompt, found, resumed)


def pushed_out(**options: float) -> Script:
    """`a` loses its blocks to `b` in the middle of its answer, and computes again what it had."""
    script = Script(**options)
    script.step(("a", 0, 4, P, "new"), admitted=[admission("a", 100.0, 4)])
    script.step(("a", 4, 1, G, "decode"), ("b", 0, 4, P, "new"), admitted=[admission("b", script.now, 4)])
    script.step(("b", 4, 1, G, "decode"), preempted=["a"])
    script.step(("b", 5, 1, G, "decode"), ends=[("b", 3)], dropped=["a"])
    script.step(("a", 0, 4, P, "resumed"), admitted=[admission("a", 100.0, 4, resumed=True)], dropped=["b"])
    script.step(("a", 4, 2, G, "resumed"))
    script.step(("a", 6, 1, G, "decode"), ends=[("a", 4)])
    return script
