"""How close the native backend is to float32 on the same weights, on English text; needs the test extra.

Usage: .venv/bin/python -m benchmarks.quality [--output FILE]
The same comparison as tests/e2e/test_native_quality.py, written down. Layouts other than the file's are compared with float32 on the
values they stand for: the loss is that of our arithmetic, not of a quantisation.
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
    for mode, layout in (("none", "bfloat16"), ("int8", "quantize int8"), ("int4", "quantize int4")):
        with tempfile.TemporaryDirectory() as folder:
            found = quality.layout_figures(path, Path(folder), mode, [window for window, _ in truth])
        for kind, values in found.items():
            results[f"{kind} rows, {layout}"] = values
            print(f"{kind} rows, {layout}", values)
    method = f"windows of {quality.WINDOW} tokens of the standard library's help texts; float32 in transformers on the dequantised weights"
    record.write(options.output or RESULTS / "quality.json", "quality", "python -m benchmarks.quality", method, before, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
