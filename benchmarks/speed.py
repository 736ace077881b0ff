"""The speed that README.md states: SmolLM2 in this process, alone and in batches, as `octavo bench latency` measures it.

Usage: .venv/bin/python -m benchmarks.speed [--rounds 5] [--threads 0] [--output FILE]
Not here: how it is measured (octavo.bench.latency), other engines, single kernels, the server (batch_sizes.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import RESULTS
from octavo import LLM
from octavo.bench import latency, record
from octavo.bench.latency import Case
from octavo.bench.statistics import summary

#: Name in the results -> (prompt tokens, generated tokens, requests at once), and which rate of the case is meant.
CASES = {
    "prefill, 512 tokens": (Case(512, 1, 1), "prefill"),
    "decode, 1 request, 512 tokens of prompt": (Case(512, 48, 1), "decode"),
    "decode, 1 request, 2048 tokens of prompt": (Case(2048, 48, 1), "decode"),
    "decode, 8 requests, 128 tokens of prompt": (Case(128, 48, 8), "decode"),
    "decode, 32 requests, 128 tokens of prompt": (Case(128, 32, 32), "decode"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5); one more goes first")
    parser.add_argument("--threads", type=int, default=0, help="threads of the kernels (default: what the machine allows)")
    parser.add_argument("--output", type=Path, help="where to write; default results/speed.json")
    options = parser.parse_args(arguments)
    before = record.machine()
    with LLM("smollm2", backend="cpu", threads=options.threads, enable_prefix_caching=False, event_history=100_000) as llm:
        measured = latency.measure(llm, [case for case, _ in CASES.values()], options.rounds)
    method = f"tokens/s; {options.rounds} rounds after one to warm up, the cases in turn; whole steps of the engine, sampling included"
    results = {name: summary(getattr(measured[case], rate), 1) for name, (case, rate) in CASES.items()}
    record.write(options.output or RESULTS / "speed.json", "speed", "python -m benchmarks.speed", method, before, results)
    for name, values in results.items():
        print(f"{name:44} median {values['median']:8.1f} tokens/s   min {values['min']:.1f}   max {values['max']:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
