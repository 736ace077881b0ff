"""How close the native backend is to float32 on the same weights, on English text; needs the test extra.

Usage: .venv/bin/python -m benchmarks.quality [--output FILE]
The same comparison as tests/e2e/test_native_quality.py, written down; and the same weights as float32 in a file, quantised
while loading (--quantize): that is the loss of a second quantisation, of weights that had four bits before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import RESULTS
from octavo.bench import record
from octavo.loading.source import resolve_source
from tests.e2e import test_native_quality as quality
from tests.models import harness
from tests.models.oracle import smollm2_in_transformers


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write; default results/quality.json")
    options = parser.parse_args()
    before = record.machine()
    path = resolve_source("smollm2").paths[0]
    truth = quality.float32_truth(path)
    results = {}
    for kv_dtype, suffix in (("bf16", ""), ("int8", ", int8 KV")):
        executor = harness.load(path, backend="cpu", kv_dtype=kv_dtype)
        for kind, num_prompt in (("prompt rows", None), ("generated rows", 1)):
            logits = [harness.all_logits(executor, window, num_prompt=num_prompt) for window, _ in truth]
            results[kind + suffix] = quality.compare(truth, logits)
            print(kind + suffix, results[kind + suffix])
    with tempfile.TemporaryDirectory() as folder:
        smollm2_in_transformers(path).save_pretrained(folder)
        for mode in ("none", "int8", "int4"):
            executor = harness.load(folder, backend="cpu", quantize=mode)
            kind = f"float32 file, quantize {mode}, prompt rows"
            results[kind] = quality.compare(truth, [harness.all_logits(executor, window) for window, _ in truth])
            print(kind, results[kind])
    method = f"windows of {quality.WINDOW} tokens of the standard library's help texts; float32 in transformers on the dequantised weights"
    record.write(options.output or RESULTS / "quality.json", "quality", "python -m benchmarks.quality", method, before, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
