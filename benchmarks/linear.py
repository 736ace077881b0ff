"""How fast one matrix product on quantised weights runs, by layout and number of rows, on one thread and from cache.

Usage: .venv/bin/python -m benchmarks.linear [--isa LEVEL] [--rounds 300] [--output FILE]
CPU time, and the quickest of many calls: what the kernel can do, not what a shared machine lets through.
Not here: reading weights from memory, several threads, whole steps (speed.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS
from octavo.bench import record
from octavo.ops.api import PackedTensor
from octavo.ops.cpu import CpuOps

ROWS = (1, 2, 3, 4, 6, 8, 16, 64)
#: SmolLM2's width; so many columns that the weight fits in a second-level cache of 512 KB.
N, K = 512, 576


def weight(rng: np.random.Generator, layout: str) -> PackedTensor:
    """Random bytes; an offset with the 4-bit weights, as Q4_1 has."""
    scale = (rng.random((N, K // (16 if layout == "q8_b16" else 32))) * 0.01).astype(np.float16)
    if layout == "q4_b32":
        return PackedTensor(layout, (N, K), rng.integers(0, 256, (N, K // 2), dtype=np.uint8), scale, scale)
    return PackedTensor(layout, (N, K), rng.integers(-128, 128, (N, K), dtype=np.int8), scale)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--isa", help="instruction-set level (default: the strongest)")
    parser.add_argument("--rounds", type=int, default=300, help="calls of which the quickest counts (default 300)")
    parser.add_argument("--output", type=Path, help="where to write; default results/linear.json")
    options = parser.parse_args()
    before = record.machine()
    ops, rng = CpuOps(max(ROWS), threads=1, isa=options.isa), np.random.default_rng(0)
    results: dict[str, Any] = {}
    for layout in ("q4_b32", "q8_b32", "q8_b16"):
        packed = ops.pack_linear([weight(rng, layout)])
        for rows in ROWS:
            x, seconds = rng.standard_normal((rows, K)).astype(np.float32), []
            for _ in range(options.rounds):
                ops.begin_step(rows)
                start = time.thread_time()
                ops.linear(x, packed, rows)
                seconds.append(time.thread_time() - start)
            results[f"{layout}, rows: {rows}"] = round(rows * N * K / min(seconds) / 1e9, 1)
            print(layout, rows, results[f"{layout}, rows: {rows}"], flush=True)
    method = f"10^9 multiply-adds a second, level {ops.describe()['isa']}, one thread, {N} columns of {K} inputs, rounding of x included"
    record.write(options.output or RESULTS / "linear.json", "linear", "python -m benchmarks.linear", method, before, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
