"""The native backend against float32 on the same weights, on real English text: perplexity, KL divergence, agreement.

Prompt rows in one pass; generated rows fed one at a time, as decoding would. The text is the standard library's help. Every
weight layout: that of the file, bfloat16, and groups of 8 and 4 bits made while loading. Then the truth is float32 on the very
values that the groups stand for, so that what is measured is our arithmetic, not the loss of a quantisation.
"""

from __future__ import annotations

import functools
import pydoc_data.topics
from pathlib import Path

import numpy as np
import pytest

from octavo.loading.source import resolve_source
from octavo.ops.api import PackedTensor
from octavo.quantization import groups
from octavo.quantization.packed import dequantize
from octavo.tokenizer import load_tokenizer
from tests.models import harness
from tests.models.oracle import logits_of, smollm2_in_transformers

pytest.importorskip("torch")
pytest.importorskip("octavo._native", reason="needs the native module")

TOPICS = ("assignment", "lambda", "while", "try")
WINDOW = 400


def english(tokenizer) -> list[list[int]]:
    """One window of tokens from the middle of each topic."""
    return [tokenizer.encode(pydoc_data.topics.topics[name])[:WINDOW] for name in TOPICS]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def float32_truth(path: Path) -> list[tuple[list[int], np.ndarray]]:
    """Each window of tokens, and the float32 model's logprobs after every token of it."""
    tokenizer = load_tokenizer(resolve_source(str(path)))
    return truth_of(smollm2_in_transformers(path), english(tokenizer))


def truth_of(oracle, windows) -> list[tuple[list[int], np.ndarray]]:
    return [(window, log_softmax(logits_of(oracle, window))) for window in windows]


def in_layout(oracle, quantize: str) -> None:
    """Give the float32 model the values its weights have in that layout."""
    import torch

    for name, parameter in oracle.named_parameters():
        if quantize == "none":
            parameter.data = parameter.data.to(torch.bfloat16).float()
        elif parameter.dim() == 2:
            values = parameter.data.numpy()
            bits = 8 if quantize == "int8" or "layers" not in name else 4
            parameter.data = torch.from_numpy(dequantize(groups.quantize(PackedTensor("f32", values.shape, values), bits)))


@pytest.fixture(scope="module")
def truth(smollm2_path):
    return float32_truth(smollm2_path)


def compare(truth, ours) -> dict[str, float]:
    """Perplexities of the true next token, mean KL(float32 || ours) per token, share of equal argmax."""
    nll_true, nll_ours, kl, agree = [], [], [], []
    for (window, expected), got in zip(truth, ours, strict=True):
        got, target = log_softmax(got), np.array(window[1:])
        rows = np.arange(len(target))
        nll_true.extend(-expected[rows, target])
        nll_ours.extend(-got[rows, target])
        kl.extend((np.exp(expected) * (expected - got)).sum(axis=1))
        agree.extend(expected.argmax(axis=1) == got.argmax(axis=1))
    return {
        "perplexity_float32": float(np.exp(np.mean(nll_true))),
        "perplexity": float(np.exp(np.mean(nll_ours))),
        "kl": float(np.mean(kl)),
        "agreement": float(np.mean(agree)),
        "tokens": len(agree),
    }


@pytest.fixture(scope="module")
def figures(truth, smollm2_path):
    """(kind of the rows, KV dtype) -> the figures of the native backend, each computed once."""

    @functools.cache
    def of(kind: str, kv_dtype: str) -> dict[str, float]:
        executor = harness.load(smollm2_path, backend="cpu", kv_dtype=kv_dtype)
        num_prompt = None if kind == "prompt" else 1
        return compare(truth, [harness.all_logits(executor, window, num_prompt=num_prompt) for window, _ in truth])

    return of


def layout_figures(path: Path, folder: Path, quantize: str, windows) -> dict[str, dict[str, float]]:
    """Kind of the rows -> figures of the model of `path`, written to `folder` as floats and loaded with `quantize`."""
    import torch

    oracle = smollm2_in_transformers(path)
    oracle.to(torch.bfloat16 if quantize == "none" else torch.float32).save_pretrained(folder)
    in_layout(oracle.float(), quantize)
    truth = truth_of(oracle, windows)
    executor = harness.load(folder, backend="cpu", quantize=quantize)
    kinds = {"prompt": None, "generated": 1}
    return {kind: compare(truth, [harness.all_logits(executor, w, num_prompt=n) for w in windows]) for kind, n in kinds.items()}


def is_close(measured: dict[str, float], kind: str) -> None:
    """The promise of docs/numerics.md."""
    most, most_kl = (0.005, 0.005) if kind == "prompt" else (0.01, 0.01)
    assert measured["tokens"] > 1000
    assert abs(measured["perplexity"] / measured["perplexity_float32"] - 1) <= most
    assert measured["kl"] <= most_kl


@pytest.mark.parametrize("kind", ["prompt", "generated"])
def test_native_is_close_to_float32(figures, kind):
    is_close(figures(kind, "bf16"), kind)
    assert figures(kind, "bf16")["agreement"] >= 0.97


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_it_is_close_in_every_weight_layout(quantize, smollm2_path, truth, tmp_path):
    for kind, measured in layout_figures(smollm2_path, tmp_path, quantize, [window for window, _ in truth]).items():
        is_close(measured, kind)


@pytest.mark.parametrize("kind", ["prompt", "generated"])
def test_int8_kv_costs_little(figures, kind):
    """Against bfloat16 KV, the default; and against float32, so that two wrongs cannot agree."""
    measured, default = figures(kind, "int8"), figures(kind, "bf16")
    assert measured["perplexity"] != default["perplexity"]  # int8 was in use
    assert abs(measured["perplexity"] / default["perplexity"] - 1) <= 0.005
    assert measured["kl"] <= 0.01
    if kind == "prompt":  # generated rows have spent most of the 3 % on activations of eight bits
        assert measured["agreement"] >= 0.97
