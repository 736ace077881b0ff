"""Every GGUF weight format through loading, packing and the whole model, on the reference and the native kernels, against
transformers on the values that the `gguf` package reads from the same bytes; and safetensors in half precisions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models import harness
from tests.models.oracle import logits_of
from tests.tiny_models import hf_model, write_tiny

pytest.importorskip("torch")
TYPES = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
#: Largest difference as a share of the largest logit. Native: activations of quantised weights have 15 bits in prompt rows.
TOLERANCE = {"reference": 1e-4, "cpu": 1e-3}
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}


def check(path, oracle, backend: str, four_bits: bool = False) -> None:
    """four_bits: generated rows meet 4-bit weights, natively with activations of 8 bits; they are held to the mean KL per token."""
    executor = harness.load(path, backend=backend, kv_dtype="f32")
    tokens = np.random.default_rng(2).integers(0, executor.model_config.vocab_size, 40).tolist()
    theirs = logits_of(oracle, tokens)
    exact = backend == "reference" or not four_bits
    ours = harness.all_logits(executor, tokens, num_prompt=30 if exact else None, chunk=16)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < TOLERANCE[backend]
    if not exact:
        expected, got = (log_softmax(x) for x in (theirs, harness.all_logits(executor, tokens, num_prompt=5, chunk=16)))
        assert 1e-9 < (np.exp(expected) * (expected - got)).sum(axis=1).mean() < 0.01


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_types(tmp_path, family, kind):
    tiny = write_tiny(tmp_path / "m", family=family, fmt="gguf", seed=4, quant=kind, **SHAPE)
    oracle = hf_model(tiny)
    check(tiny.path, oracle, "reference")
    pytest.importorskip("octavo._native", reason="the native module is not built")
    check(tiny.path, oracle, "cpu", four_bits=kind.startswith("Q4"))


def test_formats_mixed_inside_one_fused_weight(tmp_path):
    """q, k and v, or gate and up, in different formats, as files made for quality have them."""
    quant = {"": "Q4_K", "output.weight": "Q6_K"}
    quant |= {"blk.0.attn_v.weight": "Q6_K", "blk.0.attn_k.weight": "Q8_0", "blk.1.ffn_up.weight": "F16"}
    tiny = write_tiny(tmp_path / "m", fmt="gguf", seed=4, quant=quant, tie_word_embeddings=False, **SHAPE)
    oracle = hf_model(tiny)
    check(tiny.path, oracle, "reference")
    pytest.importorskip("octavo._native", reason="the native module is not built")
    check(tiny.path, oracle, "cpu", four_bits=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_safetensors_in_shards(tmp_path, dtype):
    tiny = write_tiny(tmp_path / "m", family="qwen2", seed=4, dtype=dtype, shards=3, **SHAPE)
    oracle = hf_model(tiny)
    check(tiny.path, oracle, "reference")
    pytest.importorskip("octavo._native", reason="the native module is not built")
    check(tiny.path, oracle, "cpu")
