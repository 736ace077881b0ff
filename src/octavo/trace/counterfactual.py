"""When a request would have ended in a pool without end: the requests of a trace scheduled anew, each step priced by the row model.

The rules are the scheduler's in short: decodes first, then half-done prompts, then the queue in order of arrival, under the limits of
a step. Stateless. Not here: the scheduler (engine/scheduler.py), policies other than the order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.scheduler_output import TokenKind
from octavo.trace.explain import Case
from octavo.trace.lives import Life
from octavo.trace.record import end
from octavo.trace.row_model import Rows

#: No trace has so many steps; a bound, so that it ends whatever a file says.
MOST_STEPS = 1_000_000


@dataclass(slots=True)
class _Running:
    life: Life
    computed: int
    drawn: int = 0

    @property
    def prompt(self) -> int:
        return self.life.num_prompt_tokens

    @property
    def left(self) -> int:
        return self.prompt - self.computed


def end_without_preemption(case: Case) -> float:
    """The time at which the request would have ended."""
    steps = case.trace.steps
    parents = {life.parent for life in case.all.values()}
    queue = sorted(
        (life for life in case.all.values() if life.complete and life.num_output_tokens > 0 and life.request_id not in parents),
        key=lambda life: (life.admissions[0][1].added, life.admissions[0][0]),
    )
    gaps = [
        max(0.0, later.time - end(earlier)) for earlier, later in zip(steps, steps[1:], strict=False) if earlier.waiting + earlier.running
    ]
    gap = sorted(gaps)[len(gaps) // 2] if gaps else 0.0
    time = steps[queue[0].admissions[0][0]].time
    running: list[_Running] = []
    for _ in range(MOST_STEPS):
        entries = _schedule(case, running, queue, time)
        if not entries:
            if not queue:
                break
            time = max(time, queue[0].admissions[0][1].added)
            continue
        time += case.model.seconds(row for _, row in entries)
        for one, row in entries:
            one.computed += row.tokens
            one.drawn += one.computed >= one.prompt
            if one.drawn >= one.life.num_output_tokens:
                if one.life is case.life:
                    return time
                running.remove(one)
        time += gap
    return time


def _schedule(case: Case, running: list[_Running], queue: list[Life], time: float) -> list[tuple[_Running, Rows]]:
    limits = case.trace.settings
    budget = limits.max_num_batched_tokens or 512
    found: list[tuple[_Running, Rows]] = []
    decodes = [one for one in running if one.left <= 0]
    for one in decodes[: min(budget, limits.max_decode_batch_size or 64)]:
        found.append((one, Rows(one.computed, 1, TokenKind.GENERATED)))
    for one, _ in found:  # round robin
        running.remove(one)
        running.append(one)
    budget -= len(found)
    prefills = [one for one in running if one.left > 0]
    while queue and queue[0].admissions[0][1].added <= time and len(running) < (limits.max_num_seqs or 64):
        life = queue.pop(0)
        running.append(_Running(life, min(life.admissions[0][1].num_found, life.num_prompt_tokens - 1)))
        prefills.append(running[-1])
    for one in prefills[: limits.max_prefill_batch_size or 16]:
        if count := min(budget, one.left):
            found.append((one, Rows(one.computed, count, TokenKind.PROMPT)))
            budget -= count
    return found
