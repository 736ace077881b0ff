"""The simulated scheduler beside the real engine: three workloads on SmolLM2, each run by the wall clock and by the virtual one.

Usage: .venv/bin/python -m benchmarks.simulator [--scale 1.0] [--policy fcfs] [--workloads LIST] [--output FILE.json]
Workloads: Poisson arrivals; bursts of 12; prompts that share one of 4 beginnings. Requests have given lengths (ignore_eos) and arrive by
the clock, in this process, without a server. Steps are measured before and after each real run, and the costs fitted to all of them, so
that a machine that gets slower disturbs both sides; the simulator has seen no workload. Writes results/simulator.json: throughput, TTFT
and ITL of both and their ratios. Exit code 1 if a throughput or p95 TTFT differs by more than 20 %.
Not here: HTTP, other models.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from octavo.bench import record
from octavo.bench.simulate import calibrate, costs, report, run
from octavo.bench.simulate.trace import Lengths, Synthetic, TraceRequest, describe, token_ids
from octavo.bench.statistics import distribution
from octavo.config import EngineConfig
from octavo.engine.engine_core import EngineCore
from octavo.sampling_params import SamplingParams
from octavo.wiring import EngineParts

BOUND = 0.20
SHORT, ANSWERS = Lengths("lognormal", 60, 0.6), Lengths("lognormal", 40, 0.5)
WORKLOADS = {
    "poisson": Synthetic(80, 2.5, SHORT, ANSWERS, seed=1, most_tokens=1024),
    "burst": Synthetic(84, 2.0, SHORT, ANSWERS, burst=12, seed=2, most_tokens=1024),
    "prefixes": Synthetic(80, 2.5, SHORT, ANSWERS, prefixes=4, prefix_tokens=160, seed=3, most_tokens=1024),
}


def real(parts: EngineParts, config: EngineConfig, requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """Run a trace by the wall clock on a fresh core; what was seen, in the words of the simulator's report."""
    core, inputs = EngineCore(parts.executor, parts.tokenizer, config), parts.input_processor()
    vocabulary = parts.executor.info.vocab_size
    ids = (min(1000, vocabulary // 4), vocabulary * 3 // 4)
    prompts = [token_ids(request, number, *ids) for number, request in enumerate(requests)]
    ttft, e2el, gaps, last, following = {}, {}, [], {}, 0
    begin = time.perf_counter()
    while following < len(requests) or core.has_unfinished_requests():
        now = time.perf_counter()
        while following < len(requests) and begin + requests[following].arrival <= now:
            request = requests[following]
            params = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
            arrival = begin + request.arrival
            core.add_request(inputs.process(str(following), prompts[following], params, arrival=arrival, tenant=request.tenant))
            following += 1
        if not core.has_unfinished_requests():
            time.sleep(max(0.0, begin + requests[following].arrival - time.perf_counter()))
            continue
        deltas = core.step()
        now = time.perf_counter()
        for delta in deltas:
            number = int(delta.request_id)
            arrival = begin + requests[number].arrival
            if delta.token_ids:
                if number in last:
                    gaps.append(now - last[number])
                else:
                    ttft[number] = now - arrival
                last[number] = now
            if delta.finish_reason is not None:
                if delta.finish_reason != "length":
                    raise RuntimeError(f"request {number} ended by {delta.finish_reason}: {delta.error}")
                e2el[number] = now - arrival
    seconds = time.perf_counter() - begin
    tokens = sum(request.output_tokens for request in requests)
    return {
        "duration_s": round(seconds, 4),
        "output_tokens_per_s": round(tokens / seconds, 2),
        "ttft_ms": distribution(list(ttft.values())),
        "itl_ms": distribution(gaps),
        "e2el_ms": distribution(list(e2el.values())),
        "steps": core.stats.steps,
        "prefix_hit_tokens": core.stats.prefix_hit_tokens,
        "preemptions": core.stats.preemptions,
    }


def ratios(simulated: dict[str, Any], measured: dict[str, Any]) -> dict[str, float]:
    """Simulated over measured."""
    found = {"output_tokens_per_s": simulated["output_tokens_per_s"] / measured["output_tokens_per_s"]}
    for name in ("ttft_ms", "itl_ms", "e2el_ms"):
        found |= {f"{name}_{part}": simulated[name][part] / measured[name][part] for part in ("p50", "p95")}
    return {name: round(value, 3) for name, value in found.items()}


def compare(
    name: str,
    parts: EngineParts,
    config: EngineConfig,
    requests: Sequence[TraceRequest],
    measured: dict[str, Any],
    samples: Sequence[costs.Sample],
) -> dict[str, Any]:
    """Simulate the trace with costs fitted to the samples, and print both sides."""
    info, fitted = parts.executor.info, costs.fit(samples)
    simulated = report.figures(run.simulate(requests, fitted, config, info.kv_groups[0].num_blocks, info.max_model_len))
    for key, part in (("output_tokens_per_s", None), ("ttft_ms", "p50"), ("ttft_ms", "p95"), ("itl_ms", "p95")):
        mine, theirs = (side[key] if part is None else side[key][part] for side in (simulated, measured))
        words = f"{name:9} {key} {part or '':4}"
        print(f"{words:34} simulated {mine:9.1f}   measured {theirs:9.1f}   ratio {mine / theirs:.3f}", flush=True)
    return {
        "trace": describe(requests),
        "measured": measured,
        "simulated": {key: simulated[key] for key in measured},
        "simulated_over_measured": ratios(simulated, measured),
        "residuals": costs.residuals(fitted, samples),
    }


def within(found: dict[str, float]) -> bool:
    return all(abs(found[name] - 1) <= BOUND for name in ("output_tokens_per_s", "ttft_ms_p95"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="arrivals a second, times this (default 1)")
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--output", type=Path, default=RESULTS / "simulator.json")
    options = parser.parse_args(arguments)
    before = record.machine()
    config = EngineConfig(model="smollm2", backend="cpu", policy=options.policy, kv_cache_memory="512MiB")
    parts = EngineParts.load(config)
    once = calibrate.Rounds(rounds=1)
    steps = calibrate.measure(parts, config, once)
    results, good = {}, True
    for name in options.workloads.split(","):
        requests = replace(WORKLOADS[name], rate=WORKLOADS[name].rate * options.scale).make()
        measured = real(parts, config, requests)
        later = calibrate.measure(parts, config, once)
        results[name] = compare(name, parts, config, requests, measured, [*steps, *later])
        good &= within(results[name]["simulated_over_measured"])
        steps = later
    method = "each workload once by the wall clock in process and once simulated; costs fitted to steps measured before and after it"
    command = " ".join(["python -m benchmarks.simulator", *(sys.argv[1:] if arguments is None else arguments)])
    record.write(options.output, "simulator", command, method, before, results)
    parts.executor.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
