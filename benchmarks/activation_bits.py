"""What rounding the activations of quantised weights to so many bits costs in quality; why the kernels use 15 (docs/numerics.md).

Usage: .venv/bin/python -m benchmarks.activation_bits [--output FILE]      needs the test extra
An emulation: SmolLM2 in transformers in float32 on the dequantised weights, with the inputs of its matrix products rounded per
block of 32 as the kernels do. Not here: the kernels themselves (quality.py), speed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from octavo.bench import record
from octavo.loading.source import resolve_source
from octavo.tokenizer import load_tokenizer
from tests.e2e import test_native_quality as quality
from tests.models.oracle import logits_of, smollm2_in_transformers

#: name -> largest quantised activation: 127 is one plane of bytes, 127 * 128 two planes.
CASES = {"8 bits (one plane)": 127, "10 bits": 511, "12 bits": 2047, "15 bits (two planes)": 127 * 128}


def rounded(x: torch.Tensor, largest: int) -> torch.Tensor:
    """x rounded to integers in [-largest, largest] times a scale per block of 32 along the last axis."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / largest
    return (torch.where(scale > 0, torch.round(blocks / torch.where(scale > 0, scale, 1)), 0) * scale).reshape(x.shape)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write; default results/activation_bits.json")
    options = parser.parse_args()
    before = record.machine()
    files = resolve_source("smollm2")
    model = smollm2_in_transformers(files.paths[0])
    windows = quality.english(load_tokenizer(files))
    truth = [(window, quality.log_softmax(logits_of(model, window))) for window in windows]
    results: dict[str, Any] = {}
    for name, largest in CASES.items():

        def rounding(module: torch.nn.Module, inputs: tuple[torch.Tensor], largest: int = largest) -> tuple[torch.Tensor]:
            return (rounded(inputs[0], largest),)

        hooks = [m.register_forward_pre_hook(rounding) for m in model.modules() if isinstance(m, torch.nn.Linear)]
        results[name] = quality.compare(truth, [logits_of(model, window) for window in windows])
        for hook in hooks:
            hook.remove()
        print(name, results[name], flush=True)
    method = "perplexity, mean KL divergence and share of equal argmax against the same model with exact activations"
    record.write(
        options.output or RESULTS / "activation_bits.json",
        "activation_bits",
        "python -m benchmarks.activation_bits",
        method,
        before,
        results,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
