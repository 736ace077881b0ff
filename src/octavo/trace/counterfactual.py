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
from octavo.trace.row_model import Rows, rows

#: Steps that are tried for each of the trace, which needed no more: so that it ends whatever a file says.
MOST_TIMES = 4


@dataclass(slots=True)
class _Running:
    life: Life
    computed: int
    drawn: int = 0
    #: It only computes the prompt that its choices start from.
    is_parent: bool = False

    @property
    def prompt(self) -> int:
        return self.life.num_prompt_tokens - self.is_parent

    @property
    def left(self) -> int:
        return self.prompt - self.computed


def saved_without_preemption(case: Case) -> float:
    """Seconds. Both schedules, the recorded and the new one, are priced by the model, so that where it is off by some factor it is so
    for both; the time that was measured is scaled by their ratio."""
    steps = case.trace.steps
    queue = _queue(case)
    begin = queue[0].admissions[0][0]
    gap = _gap(case)
    taken = steps[begin : case.life.last + 1]
    modelled = sum(case.model.seconds(map(rows, event.entries)) for event in taken) + gap * (len(taken) - 1)
    without = _time_without(case, queue, gap)
    if without is None or modelled <= 0:
        return 0.0
    return (end(taken[-1]) - taken[0].time) * (1 - without / modelled)


def _queue(case: Case) -> list[Life]:
    """In order of arrival: all whose prompt and answer the record holds, and the parents of those that are choices."""
    whole = [life for life in case.all.values() if life.complete]
    found = [life for life in whole if life.num_output_tokens > 0 or life is case.life]
    parents = {life.parent for life in found}
    found += [life for life in whole if life.request_id in parents and life not in found]
    return sorted(found, key=lambda life: (life.admissions[0][1].added, life.admissions[0][0]))


def _gap(case: Case) -> float:
    """The usual time between two steps."""
    steps = case.trace.steps
    gaps = [
        max(0.0, later.time - end(earlier)) for earlier, later in zip(steps, steps[1:], strict=False) if earlier.waiting + earlier.running
    ]
    return sorted(gaps)[len(gaps) // 2] if gaps else 0.0


def _time_without(case: Case, queue: list[Life], gap: float) -> float | None:
    """Modelled seconds from the first admission to the end of the request; None where it comes to no end."""
    start = time = case.trace.steps[queue[0].admissions[0][0]].time
    running: list[_Running] = []
    #: Parents whose prompt is not computed yet: their choices wait for them.
    parents = {life.parent for life in queue if life.parent is not None} & {life.request_id for life in queue}
    for _ in range(MOST_TIMES * len(case.trace.steps)):
        entries = _schedule(case, running, queue, time, parents)
        if not entries:
            if not queue:
                break
            if running:
                return None
            time = max(time, queue[0].admissions[0][1].added)
            continue
        time += case.model.seconds(row for _, row in entries)
        for one, row in entries:
            one.computed += row.tokens
            one.drawn += one.computed >= one.prompt
            if one.is_parent and one.left <= 0:
                parents.discard(one.life.request_id)
                running.remove(one)
            elif not one.is_parent and one.drawn >= one.life.num_output_tokens:
                if one.life is case.life:
                    return time - start
                running.remove(one)
        time += gap
    return None


def _schedule(case: Case, running: list[_Running], queue: list[Life], time: float, parents: set[str]) -> list[tuple[_Running, Rows]]:
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
    ready = [life for life in queue if life.admissions[0][1].added <= time and life.parent not in parents]
    for life in ready[: max(0, (limits.max_num_seqs or 64) - len(running))]:
        queue.remove(life)
        is_parent = life.request_id in parents
        found_tokens = life.num_prompt_tokens - 1 if life.parent is not None else life.admissions[0][1].num_found
        running.append(_Running(life, min(found_tokens, life.num_prompt_tokens - (2 if is_parent else 1)), is_parent=is_parent))
        prefills.append(running[-1])
    for one in prefills[: limits.max_prefill_batch_size or 16]:
        if count := min(budget, one.left):
            found.append((one, Rows(one.computed, count, TokenKind.PROMPT)))
            budget -= count
    return found
