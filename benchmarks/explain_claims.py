"""Are the claims of `octavo explain` true? Four changes it says would have helped are made, and the run is timed again.

Usage: .venv/bin/python -m benchmarks.explain_claims [--rounds 3] [--output FILE]
SmolLM2, greedy. Claims: a prefix hit (the same prompt again), without the others (alone), a larger pool (no preemption), a shorter answer.
In each round the run is made without the change, with it, and without it again: the claim and the time without are the means of the
first and the third, so that a machine that becomes slower or faster shifts neither; every run is made once before, not counted.
Writes results/explain_claims.json.
Exit code 1 if the medians of fewer than three agree within 25 %.
Not here: the arithmetic on scripted clocks (tests/trace).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS
from octavo import LLM, SamplingParams
from octavo.bench import record
from octavo.cli.trace import _calibrate, of_llm
from octavo.trace import Explanation, Trace, explain

WITHIN = 0.25
Order = tuple[list[int], int]


def prompt(number: int, length: int) -> list[int]:
    return np.random.default_rng(number).integers(1000, 40000, length).tolist()


class Engine:
    def __init__(self, **settings: Any) -> None:
        self.llm = LLM("smollm2", **{"kv_cache_memory": "512MiB", "event_history": 100_000, **settings})
        self._calibration = of_llm(self.llm).steps
        before = _calibrate(self.llm)
        self._calibration = of_llm(self.llm).steps[:before]

    def run(self, orders: list[Order], *, fresh: bool = True) -> tuple[Trace, list[str]]:
        """The record of all at once, and the ids."""
        llm = self.llm
        if fresh:
            llm.reset_prefix_cache()
        before = llm.stats().steps
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for _, length in orders]
        outputs = llm.generate([tokens for tokens, _ in orders], params, progress=False)
        trace = of_llm(llm)
        trace.calibration, trace.steps = self._calibration, [event for event in trace.steps if event.step > before]
        return trace, [output.request_id for output in outputs]

    def explain(self, orders: list[Order], which: int = 0, *, fresh: bool = True) -> Explanation:
        trace, names = self.run(orders, fresh=fresh)
        return explain(trace, names[which])


def claimed(explanation: Explanation, change: str) -> float:
    return next((claim.seconds for claim in explanation.claims if change in claim.change), 0.0)


def compared(without: Callable[[], Explanation], change: str, changed: Callable[[], Explanation]) -> tuple[float, float]:
    """Seconds claimed and saved."""
    first, other, last = without(), changed(), without()
    claim = (claimed(first, change) + claimed(last, change)) / 2
    return claim, (first.total + last.total) / 2 - other.total


def prefix(engine: Engine, _: Engine) -> tuple[float, float]:
    order = [(prompt(1, 480), 24)]
    return compared(lambda: engine.explain(order), "prefix_tokens", lambda: engine.explain(order, fresh=False))


def alone(engine: Engine, _: Engine) -> tuple[float, float]:
    orders = [(prompt(10, 200), 48), *((prompt(11 + i, 80), 16 + 8 * i) for i in range(4))]
    return compared(lambda: engine.explain(orders), "without_others", lambda: engine.explain(orders[:1]))


def pool(large: Engine, _: Engine) -> tuple[float, float]:
    orders = [(prompt(20 + i, 100), 60) for i in range(4)]

    def preempted() -> list[Explanation]:
        small = Engine(num_kv_blocks=32)  # a new one: after a preemption the scheduler keeps room free for a while
        small.run([(prompt(40 + i, 24), 60) for i in range(4)])  # as warm as the large one: these four fit
        trace, names = small.run(orders)
        small.llm.close()
        return [explain(trace, name) for name in names]

    found = preempted()  # which one it is does not depend on times
    place = max(range(len(found)), key=lambda i: (found[i].num_preemptions > 0, found[i].total))
    if not found[place].num_preemptions:
        raise SystemExit("nothing was preempted: the pool is too large for this benchmark")
    return compared(lambda: preempted()[place], "larger_pool", lambda: large.explain(orders, place))


def shorter(engine: Engine, _: Engine) -> tuple[float, float]:
    tokens = prompt(30, 100)
    first = engine.explain([(tokens, 64)])
    (length,) = (claim.change["answer_tokens"] for claim in first.claims if "answer_tokens" in claim.change)
    return compared(lambda: engine.explain([(tokens, 64)]), "answer_tokens", lambda: engine.explain([(tokens, int(length))]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "explain_claims.json")
    options = parser.parse_args(arguments)
    before = record.machine()
    large = Engine()
    cases = {
        "prefix hit": (prefix, large),
        "without the others": (alone, large),
        "larger pool": (pool, large),
        "shorter answer": (shorter, large),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for round_ in range(options.rounds + 1):
        for name, (case, engine) in cases.items():
            pair = case(engine, large)
            if round_:  # the first one only warms up
                found[name].append(pair)
    results: dict[str, Any] = {}
    for name, pairs in found.items():
        claim, truth = (1000 * statistics.median(values) for values in zip(*pairs, strict=True))
        runs = [[round(1000 * value, 2) for value in pair] for pair in pairs]
        error = abs(claim - truth) / abs(truth) if truth else float("inf")
        results[name] = {"claimed ms": round(claim, 2), "measured ms": round(truth, 2), "error": round(error, 4), "runs": runs}
        print(f"{name:20} claimed {claim:8.1f} ms, measured {truth:8.1f} ms: {100 * error:.1f} % off")
    method = f"greedy; medians of {options.rounds} rounds, without, with, without the change; error relative to the measured saving"
    record.write(options.output, "explain_claims", "python -m benchmarks.explain_claims", method, before, results)
    return int(sum(of["error"] <= WITHIN for of in results.values()) < 3)


if __name__ == "__main__":
    sys.exit(main())
