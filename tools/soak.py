"""A long soak: thousands of random requests at full load, each compared bit for bit with its run alone (tests/e2e/soak.py).

Usage: .venv/bin/python tools/soak.py [--requests 2000] [--seed 0] [--smollm2 50] [--kv-dtype auto]
First on a tiny model with random weights, then --smollm2 requests on SmolLM2. Exit code 1 where one differs, or where preemptions, forks,
hits, copies or recorded steps have not taken place. Not here: what a request may be, and the comparison.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.soak import MUST_HAPPEN, Outcome, Shape, draw_jobs, soak  # noqa: E402
from tests.e2e.test_soak import SMOLLM2, TINY  # noqa: E402
from tests.tiny_models import write_tiny  # noqa: E402


class Reporter:
    """A line every few seconds."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, what: str, done: int, count: int) -> None:
        if time.monotonic() - self._said > 5 or done == count:
            self._said = time.monotonic()
            print(f"  {what}: {done} of {count}", flush=True)


def run(name: str, requests: int, seed: int, shape: Shape, config: dict[str, Any], pool: int, room: int) -> bool:
    begun = time.monotonic()
    print(f"{name}: {requests} requests, seed {seed}, {pool} KV blocks", flush=True)
    try:
        outcome: Outcome = soak(draw_jobs(requests, seed, shape), config, pool, room, seed, Reporter())
    except AssertionError as error:
        print(f"FAILED: {error}")
        return False
    print(
        f"  {outcome.requests} requests, {outcome.choices} choices, {outcome.tokens} tokens in {time.monotonic() - begun:.0f} s: all equal"
    )
    print("  ended by " + ", ".join(f"{reason} {count}" for reason, count in sorted(outcome.reasons.items())))
    print("  " + ", ".join(f"{name} {outcome.stats[name]}" for name in MUST_HAPPEN), flush=True)
    missing = [name for name in MUST_HAPPEN if not outcome.stats[name]]
    if missing:
        print(f"FAILED: never happened: {', '.join(missing)}")
    return not missing


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="on the tiny model (default 2000)")
    parser.add_argument("--smollm2", type=int, default=50, help="on SmolLM2 (default 50; 0: none)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-dtype", default="auto")
    options = parser.parse_args()
    shared = {"backend": "cpu", "kv_dtype": options.kv_dtype}
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny(Path(folder), fmt="gguf", quant="Q4_0", seed=3).path
        good = run("tiny", options.requests, options.seed, TINY, {"model": str(path), "max_model_len": 144, **shared}, 12, 100)
    if good and options.smollm2:
        good = run("smollm2", options.smollm2, options.seed, SMOLLM2, {"model": "smollm2", **shared}, 7, 40)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
