"""Rotary tables against transformers' ROPE_INIT_FUNCTIONS, GGUF frequency factors, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from octavo.errors import ModelLoadError
from octavo.model_config import RopeConfig
from octavo.ops.rope import rope_attention_factor, rope_cos_sin, rope_frequencies

LLAMA3 = RopeConfig(theta=500000.0, dim=64, kind="llama3", factor=8.0, original_max_position=8192)
YARN = RopeConfig(theta=1000000.0, dim=128, kind="yarn", factor=4.0, original_max_position=32768)
CONFIGS = {
    "default": RopeConfig(theta=10000.0, dim=64),
    "partial": RopeConfig(theta=10000.0, dim=32),
    "linear": RopeConfig(theta=100000.0, dim=64, kind="linear", factor=2.5),
    "llama3": LLAMA3,
    "llama3_other_bands": replace(LLAMA3, factor=32.0, low_freq_factor=2.0, high_freq_factor=16.0, original_max_position=4096),
    "yarn": YARN,
    "yarn_exact_range": replace(YARN, truncate=False),
    "yarn_betas": replace(YARN, beta_fast=16.0, beta_slow=2.0, factor=16.0, original_max_position=4096),
    "yarn_attention_factor": replace(YARN, attention_factor=0.75),
    "yarn_mscale": replace(YARN, factor=40.0, mscale=1.0, mscale_all_dim=0.707),
    "yarn_step": replace(YARN, beta_fast=1e-9, beta_slow=1e-9),
}


def transformers_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """inv_freq and attention factor of the same settings, float32, from transformers."""
    pytest.importorskip("torch", reason="the test extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the test extra is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim = 128
    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, "partial_rotary_factor": rope.dim / head_dim}
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        parameters |= {"attention_factor": rope.attention_factor} if rope.attention_factor else {}
        parameters |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim} if rope.mscale else {}
    longest = max(131072, int(rope.factor * rope.original_max_position))
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=longest, rope_parameters=parameters
    )
    if rope.kind == "default":  # not in the table: every model defines it itself
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config.rope_parameters.pop("partial_rotary_factor")
        config.head_dim = rope.dim
        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, "cpu")
    return frequencies.double().numpy(), float(factor)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name):
    rope = CONFIGS[name]
    frequencies, factor = transformers_frequencies(rope)
    ours = rope_frequencies(rope)
    assert ours.shape == (rope.dim // 2,)
    np.testing.assert_allclose(ours, frequencies, rtol=3e-6)  # theirs are float32
    assert rope_attention_factor(rope) == pytest.approx(factor, rel=1e-12)
    cos, sin = rope_cos_sin(rope, 40)
    angles = np.arange(40)[:, None] * frequencies
    np.testing.assert_allclose(cos, np.cos(angles) * factor, atol=2e-4)
    np.testing.assert_allclose(sin, np.sin(angles) * factor, atol=2e-4)


def test_every_kind_of_scaling_changes_something():
    plain = {dim: rope_frequencies(RopeConfig(theta=500000.0, dim=dim)) for dim in (64, 128)}
    assert not np.allclose(rope_frequencies(LLAMA3), plain[64], rtol=1e-3)
    assert not np.allclose(rope_frequencies(replace(YARN, theta=500000.0)), plain[128], rtol=1e-3)
    assert rope_attention_factor(YARN) == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_large_positions_are_exact_to_float32():
    rope = RopeConfig(theta=10000.0, dim=4)
    cos, sin = rope_cos_sin(rope, 100_001)
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == (100_001, 2)
    for position in (0, 1, 8191, 8192, 99_999, 100_000):  # around the edges of the chunks it is computed in
        for pair, frequency in enumerate((1.0, 0.01)):
            assert cos[position, pair] == np.float32(math.cos(position * frequency))
            assert sin[position, pair] == np.float32(math.sin(position * frequency))


def test_gguf_frequency_factors_equal_llama3_scaling():
    """GGUF files of Llama 3.1 hold the scaling as divisors of plain frequencies; both ways must give one table."""
    plain = replace(LLAMA3, kind="default", factor=1.0)
    divisors = rope_frequencies(plain) / rope_frequencies(LLAMA3)
    as_gguf = replace(plain, freq_factors=tuple(float(np.float32(d)) for d in divisors))
    for position in (0, 1000, 20_000):
        for ours, theirs in zip(rope_cos_sin(as_gguf, 20_001), rope_cos_sin(LLAMA3, 20_001), strict=True):
            np.testing.assert_allclose(ours[position], theirs[position], atol=2e-3)
    assert not np.allclose(rope_cos_sin(as_gguf, 1001)[0][1000], rope_cos_sin(plain, 1001)[0][1000], atol=0.05)


@pytest.mark.parametrize(
    "bad",
    [
        {"dim": 63}, {"dim": 0}, {"theta": 1.0}, {"theta": math.inf}, {"kind": "longrope"},
        {"kind": "linear", "factor": 0.0}, {"kind": "linear", "factor": math.nan},
        {"kind": "llama3", "factor": 8.0}, {"kind": "yarn", "factor": 8.0},
        {"kind": "llama3", "original_max_position": 8192, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"kind": "yarn", "original_max_position": 8192, "beta_fast": 0.0},
        {"freq_factors": (1.0,)}, {"freq_factors": (1.0,) * 31 + (0.0,)},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ModelLoadError, match="rope"):
        rope_cos_sin(RopeConfig(**bad), 8)
