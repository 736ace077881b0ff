"""What drawing tokens costs: rows of logits by the native sampler and by the NumPy specification, and whole steps of SmolLM2.

Usage: .venv/bin/python -m benchmarks.sampling [--rounds 9] [--step-ms 300] [--threads 0] [--output FILE]
--step-ms: a greedy decode step of eight requests of the 7B model, which this script does not run; the last lines of the results
set the sampling of such rows against it, as an estimate.
Not here: matrix products, prompts, the server.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS
from octavo import LLM, SamplingParams
from octavo.bench import record
from octavo.bench.latency import WHOLE
from octavo.bench.statistics import summary
from octavo.ops.cpu import CpuOps
from octavo.sampling.native import NativeSampler
from octavo.sampling.sampler import NumpySampler, Sampler
from octavo.sampling.state import SamplingState

#: SmolLM2's vocabulary and that of Qwen2.5-7B.
VOCABULARIES = (49152, 152064)
ROWS = (1, 8, 32)
CHAT = "temperature 0.7, top_p 0.9, repetition penalty 1.1"
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    CHAT: {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    "top_k 50": {"top_k": 50},
    "greedy, logprobs 5": {"temperature": 0.0, "logprobs": 5},
}
PROMPT_TOKENS = 512


def logits_of(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Mostly noise, and a head of 50 candidates above it that get likelier fast, as a language model's are."""
    logits = rng.standard_normal((rows, vocab)) * 2.5
    for row in logits:
        row[rng.integers(0, vocab, 50)] = 12 + rng.exponential(2.5, 50)
    return logits.astype(np.float32)


def states_of(rng: np.random.Generator, rows: int, vocab: int, fields: dict[str, Any]) -> list[SamplingState]:
    params = SamplingParams(**fields).resolve({})
    prompts = rng.integers(0, vocab, (rows, PROMPT_TOKENS)).tolist()
    return [SamplingState(params, i, 0, prompt, [], frozenset(), (), vocab) for i, prompt in enumerate(prompts)]


def seconds_of(sampler: Sampler, logits: np.ndarray, states: list[SamplingState]) -> float:
    start = time.perf_counter()
    sampler.sample(logits, states)
    return time.perf_counter() - start


def rows_alone(samplers: tuple[Sampler, Sampler], rounds: int) -> dict[str, Any]:
    """Milliseconds of one call, native and NumPy in turn, after one round that does not count."""
    rng, results = np.random.default_rng(0), {}
    for vocab in VOCABULARIES:
        for rows in ROWS:
            logits = logits_of(rng, rows, vocab)
            for name, fields in SETTINGS.items():
                states = states_of(rng, rows, vocab, fields)
                runs = [[seconds_of(sampler, logits, states) for sampler in samplers] for _ in range(rounds + 1)][1:]
                key = f"{rows} rows of {vocab}, {name}"
                results[key] = {
                    "native_ms": summary([1000 * native for native, _ in runs]),
                    "numpy_ms": summary([1000 * numpy for _, numpy in runs]),
                    "times_as_fast": round(statistics.median(numpy / native for native, numpy in runs), 1),
                }
                print(
                    f"{key:80} {results[key]['native_ms']['median']:8.3f} ms, NumPy {results[key]['numpy_ms']['median']:8.3f} ms",
                    flush=True,
                )
    return results


def step_ms(llm: LLM, fields: dict[str, Any], rows: int, tokens: int, rng: np.random.Generator) -> tuple[float, float]:
    """Mean milliseconds of the steps in which all requests had one token, and of their sampling."""
    prompts = [rng.integers(1000, 40000, 128).tolist() for _ in range(rows)]
    before = llm.stats().steps
    llm.generate(prompts, SamplingParams(**fields, seed=1, max_tokens=tokens, ignore_eos=True), progress=False)
    full = [s for s in llm.events(llm.stats().steps - before) if len(s.entries) == rows and all(e.num_tokens == 1 for e in s.entries)]
    times = [1000 * sum(step.timings[part] for part in WHOLE) for step in full]
    return statistics.mean(times), 1000 * statistics.mean(step.timings["sample"] for step in full)


def whole_steps(threads: int, rounds: int, rows: int = 8, tokens: int = 48) -> dict[str, Any]:
    """SmolLM2, eight requests: greedy, sampled, and sampled by NumPy, in turn."""
    rng, runs = np.random.default_rng(1), []
    with LLM("smollm2", backend="cpu", threads=threads, enable_prefix_caching=False, event_history=100_000) as llm:
        runner = llm.executor.runner
        native, numpy = runner.sampler, NumpySampler()
        for _ in range(rounds + 1):
            found = []
            for sampler, fields in ((native, SETTINGS["greedy"]), (native, SETTINGS[CHAT]), (numpy, SETTINGS[CHAT])):
                runner.sampler = sampler
                found.append(step_ms(llm, fields, rows, tokens, rng))
            runs.append(found)
        runner.sampler = native
    runs = runs[1:]
    names = ("greedy", CHAT, f"{CHAT}, by NumPy")
    results: dict[str, Any] = {
        name: {"step_ms": summary([run[i][0] for run in runs]), "logits_and_sampling_ms": summary([run[i][1] for run in runs])}
        for i, name in enumerate(names)
    }
    for i, name in enumerate(names[1:], start=1):
        results[name]["over_greedy_percent"] = round(100 * (statistics.median(run[i][0] / run[0][0] for run in runs) - 1), 1)
    return results


def estimate(alone: dict[str, Any], greedy_step_ms: float) -> dict[str, Any]:
    """What sampling adds to a greedy step of the 7B model at eight requests, from the rows alone: not a measured step."""
    greedy, chat = (alone[f"8 rows of {VOCABULARIES[1]}, {name}"]["native_ms"]["median"] for name in ("greedy", CHAT))
    return {
        "given_greedy_step_ms": greedy_step_ms,
        "sampling_ms_over_greedy": round(chat - greedy, 3),
        "over_greedy_percent": round(100 * (chat - greedy) / greedy_step_ms, 2),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default 9); one more goes first")
    parser.add_argument("--step-ms", type=float, default=300.0, help="greedy step of the 7B model at 8 requests (default 300)")
    parser.add_argument("--threads", type=int, default=0, help="threads of the kernels (default: what the machine allows)")
    parser.add_argument("--output", type=Path, help="where to write; default results/sampling.json")
    options = parser.parse_args(arguments)
    before = record.machine()
    ops = CpuOps(threads=options.threads)
    alone = rows_alone((NativeSampler(ops.sampling_kernels), NumpySampler()), options.rounds)
    steps = whole_steps(options.threads, options.rounds)
    results = {
        "rows alone": alone,
        "SmolLM2, steps of 8 requests": steps,
        "7B model, 8 requests (an estimate)": estimate(alone, options.step_ms),
    }
    method = (
        f"{options.rounds} rounds after one to warm up, what is compared in turn; level {ops.describe()['isa']}, "
        f"{ops.describe()['threads']} threads; random logits with a head of 50 likely tokens, "
        f"{PROMPT_TOKENS} tokens of prompt under the penalty"
    )
    record.write(options.output or RESULTS / "sampling.json", "sampling", "python -m benchmarks.sampling", method, before, results)
    for name, values in steps.items():
        print(f"step, {name:70} {values['step_ms']['median']:8.2f} ms   over greedy {values.get('over_greedy_percent', 0.0):.1f} %")
    print("7B, estimated:", results["7B model, 8 requests (an estimate)"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
