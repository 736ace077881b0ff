"""An explanation in words: a table whose numbers add up as they are shown, and what would have helped.

Stateless. Not here: the numbers (explain.py).
"""

from __future__ import annotations

from typing import Any

from octavo.trace.explain import WORDS, Explanation

#: Chunks of prefill shown one by one; the rest is one line.
MOST_CHUNKS = 12


def percentages(values: list[float]) -> list[float]:
    """Shares of their sum in percent with one decimal, that add up to exactly 100.0: the largest remainders are rounded up."""
    total = sum(values)
    if total <= 0:
        return [0.0] * len(values)
    exact = [1000 * value / total for value in values]
    floors = [int(value // 1) for value in exact]
    for place in sorted(range(len(values)), key=lambda i: floors[i] - exact[i])[: 1000 - sum(floors)]:
        floors[place] += 1
    return [value / 10 for value in floors]


def lines(explanation: Explanation) -> list[str]:
    shown = _shown(explanation)
    shares = percentages([seconds for _, seconds in shown])
    width = max(len(words) for words, _ in shown)
    table = [f"  {words:{width}}  {1000 * seconds:10.1f} ms  {share:5.1f} %" for (words, seconds), share in zip(shown, shares, strict=True)]
    found = [_heading(explanation), "", *table, f"  {'in all':{width}}  {1000 * explanation.total:10.1f} ms  100.0 %"]
    if explanation.rough:
        found += ["", "All steps of the record had as many answers in them: what the others cost is a guess."]
    if explanation.claims:
        found += ["", "What would have helped (estimates):"]
        found += [f"  {-1000 * claim.seconds:9.0f} ms  {claim.words}" for claim in explanation.claims]
    return found


def as_object(explanation: Explanation) -> dict[str, Any]:
    """For --json: milliseconds."""
    shown = _shown(explanation, most=len(explanation.parts))
    shares = percentages([seconds for _, seconds in shown])
    return {
        "request_id": explanation.request_id,
        "total_ms": round(1000 * explanation.total, 4),
        "prompt_tokens": explanation.num_prompt_tokens,
        "cached_tokens": explanation.num_found,
        "completion_tokens": explanation.num_output_tokens,
        "preemptions": explanation.num_preemptions,
        "others": explanation.num_others,
        "finish_reason": explanation.reason,
        "rough": explanation.rough,
        "parts": [
            {"name": name, "words": words, "ms": round(1000 * seconds, 4), "percent": share}
            for name, (words, seconds), share in zip(explanation.parts, shown, shares, strict=True)
        ],
        "would_have_helped": [
            {"words": claim.words, "ms": round(-1000 * claim.seconds, 2), **claim.change} for claim in explanation.claims
        ],
    }


def _heading(explanation: Explanation) -> str:
    found = f" ({explanation.num_found} of them found in the cache)" if explanation.num_found else ""
    answer = f"{explanation.num_output_tokens} token" + ("" if explanation.num_output_tokens == 1 else "s")
    company = f", in steps with {explanation.num_others} other request" + ("" if explanation.num_others == 1 else "s")
    times = explanation.num_preemptions
    preempted = "" if not times else ", preempted once" if times == 1 else f", preempted {times} times"
    return (
        f"{explanation.request_id}: {explanation.total:.3f} s from arrival to last token; prompt of {explanation.num_prompt_tokens} "
        f"tokens{found}, answer of {answer}{company if explanation.num_others else ', alone'}{preempted}"
    )


def _shown(explanation: Explanation, most: int = MOST_CHUNKS) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    chunks, rest = 0, 0.0
    for name, seconds in explanation.parts.items():
        if not name.startswith("prefill "):
            if rest:
                found.append((f"prefill, {chunks - most} more chunks", rest))
                rest = 0.0
            found.append((WORDS[name], seconds))
            continue
        chunks += 1
        _, first, stop = name.split()
        words = f"prefill, tokens {first} to {int(stop) - 1}"
        if chunks <= most:
            found.append((words, seconds))
        else:
            rest += seconds
    return found
