"""What a step costs the scheduler with 256 sequences running and 10,000 waiting, for every policy: no model, no text.

Usage: .venv/bin/python -m benchmarks.scheduler_cost [--running 256] [--waiting 10000] [--decodes 64] [--steps 400]
                                                       [--rounds 3] [--output FILE]
Each step gives --decodes running sequences a token, ends some and admits others, so that the queue is worked at, and refills it.
Prompts fall into 200 families with common beginnings, requests into 50 tenants and 5 priorities. Timed are `schedule` and
`complete_step`, in milliseconds. Writes results/scheduler_cost.json. Exit code 1 if a median of the two together reaches 1 ms.
Not here: throughput under a policy, the time the model takes.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

from benchmarks import RESULTS
from octavo.bench import record
from octavo.config import EngineConfig, PolicyName
from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.metrics import EngineStats
from octavo.engine.request import EngineRequest, Request, RequestStatus
from octavo.engine.scheduler import Scheduler
from octavo.engine.scheduler_output import KVGroup
from octavo.sampling_params import SamplingParams

BLOCK = 16


class Load:
    """Requests without end, the same for every policy."""

    def __init__(self) -> None:
        self._random = random.Random(7)
        self._params = SamplingParams(max_tokens=200, temperature=0).resolve({})
        self._count = 0

    def next(self) -> tuple[Request, int]:
        """A request, and how many tokens it will generate."""
        draw = self._random
        self._count += 1
        family = draw.randrange(200)
        shared = [family * 1000 + i for i in range(BLOCK * draw.randrange(0, 12))]
        prompt = shared + [draw.randrange(300_000) for _ in range(draw.randrange(1, 200))]
        origin = EngineRequest(
            f"r{self._count}", prompt, self._params, 200, 1, priority=draw.randrange(5), tenant=f"tenant {draw.randrange(50)}"
        )
        return Request(origin, self._count), draw.randrange(20, 200)


def run(policy: PolicyName, running: int, waiting: int, decodes: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of each measured step, by part."""
    config = EngineConfig(
        policy=policy, max_num_seqs=running, max_decode_batch_size=decodes, max_num_batched_tokens=4 * decodes, max_waiting_requests=10**6
    )
    stats = EngineStats()
    kv = KVCacheManager((KVGroup(running * 40, BLOCK),), True, stats)
    scheduler, load, lengths = Scheduler(config, kv, stats), Load(), {}
    found: dict[str, list[float]] = {"schedule": [], "complete_step": [], "both": []}
    warm = 0
    while len(found["both"]) < steps:
        while scheduler.num_waiting < waiting:
            request, lengths[request.request_id] = load.next()
            scheduler.add(request)
        begun = perf_counter()
        scheduler.schedule()
        scheduled = perf_counter()
        done = scheduler.complete_step(())
        ended = perf_counter()
        warm = warm + 1 if scheduler.num_running >= running - 16 else 0
        if warm > 20:
            for name, seconds in (("schedule", scheduled - begun), ("complete_step", ended - scheduled), ("both", ended - begun)):
                found[name].append(1000 * seconds)
        for request, entry in done:
            if entry.sample:
                scheduler.append_token(request, 5)
                if request.num_output_tokens >= lengths[request.request_id]:
                    scheduler.finish(request, RequestStatus.FINISHED_LENGTH)
                    del lengths[request.request_id]
    return found


def figures(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    picks = {"median": statistics.median(ordered), "p95": ordered[int(0.95 * len(ordered))], "p99": ordered[int(0.99 * len(ordered))]}
    return {name: round(value, 3) for name, value in picks.items()} | {"max": round(ordered[-1], 3)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--decodes", type=int, default=64, help="sequences given a token (default 64)")
    parser.add_argument("--steps", type=int, default=400, help="steps measured of each policy in each round (default 400)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, the policies in turn (default 3)")
    parser.add_argument("--output", type=Path, default=RESULTS / "scheduler_cost.json")
    options = parser.parse_args(arguments)
    before = record.machine()
    policies: tuple[PolicyName, ...] = get_args(PolicyName)
    measured: dict[str, dict[str, list[float]]] = {policy: {"schedule": [], "complete_step": [], "both": []} for policy in policies}
    for _ in range(options.rounds):
        for policy in policies:
            gc.collect()
            for name, values in run(policy, options.running, options.waiting, options.decodes, options.steps).items():
                measured[policy][name] += values
    results: dict[str, Any] = {policy: {name: figures(values) for name, values in parts.items()} for policy, parts in measured.items()}
    method = (
        f"milliseconds a step; {options.running} running, {options.waiting} waiting; {options.rounds} rounds of {options.steps} steps, "
        f"the policies in turn; {options.decodes} of the running sequences get a token in each step"
    )
    command = " ".join(["python -m benchmarks.scheduler_cost", *(sys.argv[1:] if arguments is None else arguments)])
    record.write(options.output, "scheduler_cost", command, method, before, results)
    for policy, parts in results.items():
        print(f"{policy:17} " + "   ".join(f"{name} {f['median']:.3f} (p99 {f['p99']:.3f})" for name, f in parts.items()))
    return int(max(parts["both"]["median"] for parts in results.values()) >= 1)


if __name__ == "__main__":
    sys.exit(main())
