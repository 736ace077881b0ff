"""How fast the engine runs SmolLM2 in this process: prompts in, tokens out, alone and in batches.

Usage: .venv/bin/python -m benchmarks.speed [--rounds 5] [--threads 0] [--output FILE]
Each round runs every case once, in turn. Random token ids as prompts (so that no prefix is shared), greedy, no stop.
Not here: other engines, single kernels, the server.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from benchmarks import record
from octavo import LLM, SamplingParams

#: Parts of a step that are not counted twice (engine/events.py).
PARTS = ("schedule", "execute", "update")

#: name -> (requests at once, prompt tokens, generated tokens)
CASES = {
    "prefill, 512 tokens": (1, 512, 1),
    "decode, 1 request, 512 tokens of prompt": (1, 512, 48),
    "decode, 1 request, 2048 tokens of prompt": (1, 2048, 48),
    "decode, 8 requests, 128 tokens of prompt": (8, 128, 48),
    "decode, 32 requests, 128 tokens of prompt": (32, 128, 32),
}


def measure(llm: LLM, rng: np.random.Generator, requests: int, prompt: int, generated: int) -> float:
    """Tokens per second: of the prompt where one token is generated, else of all requests while each of them decodes."""
    prompts = [rng.integers(1000, 40000, prompt).tolist() for _ in range(requests)]
    before = len(llm.events())
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=generated, ignore_eos=True), progress=False)
    steps = llm.events()[before:]
    if generated == 1:
        return prompt / sum(sum(step.timings[part] for part in PARTS) for step in steps)
    full = [step for step in steps if len(step.entries) == requests and all(e.num_tokens == 1 for e in step.entries)]
    return requests * len(full) / sum(sum(step.timings[part] for part in PARTS) for step in full)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5); one more goes first")
    parser.add_argument("--threads", type=int, default=0, help="threads of the kernels (default: what the machine allows)")
    parser.add_argument("--output", type=Path, help="where to write; default results/speed.json")
    options = parser.parse_args()
    before = record.machine()
    rates: dict[str, list[float]] = {name: [] for name in CASES}
    rng = np.random.default_rng(0)
    with LLM("smollm2", backend="cpu", threads=options.threads, enable_prefix_caching=False, event_history=100_000) as llm:
        for number in range(options.rounds + 1):
            for name, case in CASES.items():
                rate = measure(llm, rng, *case)
                if number:
                    rates[name].append(rate)
    method = f"tokens/s; {options.rounds} rounds after one to warm up, the cases in turn; whole steps of the engine, sampling included"
    results = {name: record.summary(values, 1) for name, values in rates.items()}
    record.write("speed", "python -m benchmarks.speed", method, before, results, options.output)
    for name, values in results.items():
        print(f"{name:44} median {values['median']:8.1f} tokens/s   min {values['min']:.1f}   max {values['max']:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
