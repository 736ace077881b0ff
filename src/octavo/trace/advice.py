"""What would have helped a request, each with an estimate in seconds.

Estimates scale measured steps by what the row model says of the step with and without; only a run without preemption is put
together anew (counterfactual.py). benchmarks/explain_claims.py runs four of them again and compares.
Stateless. Not here: where the time went (explain.py).
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.engine.events import EntryEvent
from octavo.engine.scheduler_output import TokenKind
from octavo.trace.counterfactual import saved_without_preemption
from octavo.trace.explain import Case, Claim, Explanation
from octavo.trace.lives import last_time
from octavo.trace.record import end, seconds
from octavo.trace.row_model import Rows, rows

#: Claims of less than this are not worth a line.
LEAST_SHARE = 0.005


def claims(case: Case, explanation: Explanation) -> list[Claim]:
    found = [*_prefix(case), *_alone(case, explanation), *_pool(case), *_shorter_prompt(case), *_shorter_answer(case)]
    return sorted((claim for claim in found if claim.seconds >= LEAST_SHARE * explanation.total), key=lambda claim: -claim.seconds)


def _saved(case: Case, change: Callable[[EntryEvent], Rows | None]) -> float:
    """Seconds saved if its entries had other rows; None: nothing to compute, the whole step would not have been waited for."""
    total = 0.0
    for number in case.span():
        event = case.trace.steps[number]
        own = case.own(event)
        if not own:
            continue
        changed = [new for entry in own if (new := change(entry)) is not None]
        if not changed:
            total += seconds(event)
            continue
        rest = [rows(entry) for entry in event.entries if entry.request_id not in case.names]
        before = case.model.seconds([*map(rows, own), *rest])
        if before > 0:
            total += seconds(event) * (1 - case.model.seconds([*changed, *rest]) / before)
    return total


def _prefix(case: Case) -> list[Claim]:
    first = case.first.admissions[0][1]
    size = case.trace.block_size
    hit = (first.num_prompt_tokens - 1) // size * size
    if hit <= first.num_found:
        return []

    def change(entry: EntryEvent) -> Rows | None:
        old = rows(entry)
        if old.kind is not TokenKind.PROMPT or old.start >= hit:
            return old
        stop = old.start + old.tokens
        return Rows(hit, stop - hit, old.kind) if stop > hit else None

    return [Claim(f"with a prefix hit on its first {hit} tokens", _saved(case, change), {"prefix_tokens": hit})]


def _alone(case: Case, explanation: Explanation) -> list[Claim]:
    if not explanation.num_others:
        return []
    saved = sum(explanation.parts.get(name, 0.0) for name in ("queue", "follow", "others", "preempted", "recompute"))
    first = case.first.admissions[0][1]
    if first.followed and first.num_found:  # alone it would have computed what it waited for
        model = case.model
        found = Rows(0, first.num_found, TokenKind.PROMPT)
        saved -= model.seconds([found]) - model.seconds([])
    words = "the other request" if explanation.num_others == 1 else f"the other {explanation.num_others} requests"
    return [Claim(f"without {words}", saved, {"without_others": explanation.num_others})]


def _pool(case: Case) -> list[Claim]:
    if not case.preempted or case.is_search:
        return []
    saved = saved_without_preemption(case)
    return [Claim("with a larger KV pool (no preemption)", saved, {"larger_pool": 1})]


def _shorter_prompt(case: Case) -> list[Claim]:
    first = case.first.admissions[0][1]
    half = (first.num_prompt_tokens + 1) // 2
    less = first.num_prompt_tokens - half
    if first.num_found >= half:
        return []

    def change(entry: EntryEvent) -> Rows | None:
        old = rows(entry)
        if old.kind is not TokenKind.PROMPT:
            return Rows(max(0, old.start - less), old.tokens, old.kind)
        return Rows(old.start, min(half, old.start + old.tokens) - old.start, old.kind) if old.start < half else None

    return [Claim(f"with a prompt half as long ({half} tokens)", _saved(case, change), {"prompt_tokens": half})]


def _shorter_answer(case: Case) -> list[Claim]:
    """The second half of its tokens, with everything that was waited for meanwhile: measured, not estimated."""
    if case.is_search:  # the best beam may be another one by then
        return []
    drawn = [number for number, entry in case.life.entries if entry.why == "decode"]
    if len(drawn) < 2:
        return []
    keep = (len(drawn) + 1) // 2
    saved = last_time(case.trace, case.life) - end(case.trace.steps[drawn[keep - 1]])
    tokens = case.life.num_output_tokens - (len(drawn) - keep)
    return [Claim(f"with an answer of {tokens} tokens", saved, {"answer_tokens": tokens})]
