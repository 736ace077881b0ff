"""How long one call of `attend` takes, by shape, KV dtype and context, on one thread, the KV read from memory as in a step.

Usage: .venv/bin/python -m benchmarks.attention [--isa LEVEL] [--rounds 60] [--output FILE]
CPU time, and the quickest of many rounds. The pool has so many layers that no cache holds it, and a round goes through all of
them; `prefill` rows are bound by arithmetic, so two layers do. Not here: several threads, whole steps (speed.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS
from octavo.bench import record
from octavo.ops.api import KVDtype, KVSpec
from octavo.ops.cpu import CpuOps
from tests.ops.op_oracle import Segment, make_batch


@dataclass(frozen=True)
class Case:
    """SmolLM2's heads unless said otherwise."""

    segments: list[Segment]
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64


CASES = {
    "1 row, 512 keys": Case([Segment(1, 512)]),
    "1 row, 2048 keys": Case([Segment(1, 2048)]),
    "8 rows, 160 keys each": Case([Segment(1, 160)] * 8),
    "prompt of 512": Case([Segment(512, 512)], layers=2),
    "1 row, 2048 keys, 28 heads of 128 on 4": Case([Segment(1, 2048)], 12, 28, 4, 128),
}
KV_DTYPES: tuple[KVDtype, ...] = ("bf16", "int8", "f16", "f32")


def microseconds(case: Case, dtype: KVDtype, isa: str | None, rounds: int) -> tuple[float, int]:
    """Of one call, and the bytes of K and V it reads at least once."""
    rng = np.random.default_rng(0)
    ops = CpuOps(512, threads=1, isa=isa)
    blocks = sum(-(-s.length // 16) for s in case.segments)
    spec = KVSpec(case.layers, blocks, 16, case.kv_heads, case.dim, dtype)
    kv = ops.alloc_kv(spec)
    values = rng.standard_normal((case.layers, 2, case.kv_heads, 16, case.dim)).astype(np.float32)
    for block in range(blocks):
        ops.import_block(kv, block, values)
    batch = make_batch(rng, case.segments, spec, kv)
    q = rng.standard_normal((batch.num_rows, case.heads, case.dim)).astype(np.float32)
    seconds = []
    for _ in range(rounds):
        start = time.thread_time()
        for layer in range(case.layers):
            ops.begin_step(batch.num_rows)
            ops.attend(q, layer, batch, 0, case.dim**-0.5)
        seconds.append((time.thread_time() - start) / case.layers)
    return min(seconds) * 1e6, blocks * ops.kv_block_bytes(spec) // case.layers


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--isa", help="instruction-set level (default: the strongest)")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of which the quickest counts (default 60)")
    parser.add_argument("--output", type=Path, help="where to write; default results/attention.json")
    options = parser.parse_args()
    before = record.machine()
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        products = 2 * case.heads * case.dim * sum(s.rows * (2 * s.length - s.rows + 1) // 2 for s in case.segments)
        for dtype in KV_DTYPES:
            taken, num_bytes = microseconds(case, dtype, options.isa, options.rounds)
            results[f"{name}, {dtype}"] = {
                "us": round(taken, 1),
                "products_per_s": round(products / taken * 1e6 / 1e9, 1),
                "gb_per_s": round(num_bytes / taken / 1e3, 1),
            }
            print(f"{name:40} {dtype:5} {taken:9.1f} us  {products / taken / 1e3:6.1f} G products/s  {num_bytes / taken / 1e3:5.1f} GB/s")
    method = "CPU time of one call on one thread, the quickest round; products_per_s in 10^9 multiply-adds; gb_per_s: K and V counted once"
    record.write(options.output or RESULTS / "attention.json", "attention", "python -m benchmarks.attention", method, before, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
