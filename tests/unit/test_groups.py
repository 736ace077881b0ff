"""Quantising while loading: error bounds and optimality against float64, damaged values, which weights are taken, the settings."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.ops.api import PackedTensor
from octavo.ops.layout import dequantize, f32_to_bf16
from octavo.quantization import groups


def matrix(rows: int, cols: int, seed: int = 0, scale: float = 0.05) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, cols)) * scale).astype(np.float32)


def packed(values: np.ndarray) -> PackedTensor:
    return PackedTensor("f32", values.shape, values)


def in_groups(values: np.ndarray, size: int) -> np.ndarray:
    return values.reshape(values.shape[0], -1, size).astype(np.float64)


@pytest.mark.parametrize(("cols", "size", "layouts"), [(256, 128, ("q4_g128", "q8_g128")), (576, 32, ("q4_b32", "q8_b32"))])
def test_layouts_and_error_bounds(cols, size, layouts):
    x = matrix(37, cols)
    wide = in_groups(x, size)
    four, eight = groups.quantize(packed(x), 4), groups.quantize(packed(x), 8)
    assert (four.layout, eight.layout) == layouts and four.scale.shape == eight.scale.shape == (37, cols // size)
    assert four.scale.dtype == four.offset.dtype == eight.scale.dtype == np.float16 and eight.offset is None
    error = np.abs(in_groups(dequantize(eight), size) - wide)
    assert (error <= np.abs(wide).max(axis=2, keepdims=True) / 127 * 0.57).all()  # half a step, and the scale's own rounding
    mean_square = ((in_groups(dequantize(four), size) - wide) ** 2).mean(axis=2)
    plain = plain_rounding(wide)
    assert (mean_square <= plain * 1.02).all() and mean_square.mean() < plain.mean() * 0.95  # the search pays


def plain_rounding(x: np.ndarray) -> np.ndarray:
    """Mean squared error of 16 even steps from the least to the largest value, float64 throughout."""
    low, high = x.min(axis=2, keepdims=True), x.max(axis=2, keepdims=True)
    step = (high - low) / 15
    return ((np.rint((x - low) / step) * step + low - x) ** 2).mean(axis=2)


@pytest.mark.parametrize("bits", [4, 8])
def test_values_on_the_grid_come_back_exactly(bits):
    rng = np.random.default_rng(1)
    q = rng.integers(0, 16, (5, 256)) if bits == 4 else rng.integers(-127, 128, (5, 256))
    q[:, ::128], q[:, 1::128] = (0, 15) if bits == 4 else (-127, 127)
    x = (q * 0.03125 - (0.25 if bits == 4 else 0)).astype(np.float32)
    np.testing.assert_array_equal(dequantize(groups.quantize(packed(x), bits)), x)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 0.5, -0.125])
def test_groups_of_one_value(bits, value):
    x = np.full((2, 128), value, np.float32)
    np.testing.assert_allclose(dequantize(groups.quantize(packed(x), bits)), x, rtol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [1e-7, 1e6])
def test_very_small_and_very_large_weights_have_float32_scales(bits, scale):
    x = matrix(3, 128, scale=scale)
    made = groups.quantize(packed(x), bits)
    assert made.scale.dtype == np.float32
    ordinary = matrix(3, 128)
    error = np.linalg.norm(dequantize(made) - x) / np.linalg.norm(x)
    usual = np.linalg.norm(dequantize(groups.quantize(packed(ordinary), bits)) - ordinary) / np.linalg.norm(ordinary)
    assert error == pytest.approx(usual, rel=0.01)  # the size of the weights does not matter


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_damage_shows_in_its_group_alone(bits, damage):
    x = matrix(2, 256)
    x[1, 130] = damage
    values = dequantize(groups.quantize(packed(x), bits))
    assert np.isnan(values[1, 128:]).all() and np.isfinite(values[0]).all() and np.isfinite(values[1, :128]).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_pieces_and_float_types_do_not_matter(bits, monkeypatch):
    values = matrix(50, 128)
    bits16 = f32_to_bf16(values)
    whole = groups.quantize(PackedTensor("bf16", values.shape, bits16), bits)
    monkeypatch.setattr("octavo.quantization.packed._PIECE", 7 * 128)
    parts = groups.quantize(packed((bits16.astype(np.uint32) << 16).view(np.float32)), bits)
    np.testing.assert_array_equal(whole.data, parts.data)
    np.testing.assert_array_equal(whole.scale, parts.scale)


def test_what_cannot_be_quantised_is_refused():
    quantised = groups.quantize(packed(matrix(2, 128)), 4)
    for bad in (quantised, packed(matrix(2, 48))):
        with pytest.raises(ValueError, match="cannot be quantised"):
            groups.quantize(bad, 4)


def test_the_setting():
    assert EngineConfig().quantize == "none" and EngineConfig(quantize="int4").quantize == "int4"
    with pytest.raises(ConfigError, match="quantize must be none, int4 or int8"):
        EngineConfig(quantize="int3")


# -- whole models ----------------------------------------------------------------------------------------------------
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def requantised(name: str, values: np.ndarray, mode: str) -> np.ndarray:
    return dequantize(groups.quantize(packed(values), 8 if mode == "int8" or "embed" in name or "lm_head" in name else 4))


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("fmt", ["safetensors", "gguf"])
def test_a_tiny_model_equals_transformers_on_the_quantised_weights(tmp_path, caplog, mode, fmt):
    """K = 128 gives groups of 128, K = 192 (the MLP's down projection) groups of 32; embedding and head have eight bits."""
    pytest.importorskip("torch")
    pytest.importorskip("octavo._native", reason="the native module is not built")
    from tests.models import harness
    from tests.models.oracle import logits_of
    from tests.tiny_models import hf_model, write_tiny

    tiny = write_tiny(tmp_path / "m", family="qwen2", fmt=fmt, seed=4, **SHAPE)
    tokens = np.random.default_rng(2).integers(0, 272, 40).tolist()
    state = {name: values if values.ndim == 1 else requantised(name, values, mode) for name, values in tiny.state_dict.items()}
    theirs, before = logits_of(hf_model(replace(tiny, state_dict=state)), tokens), logits_of(hf_model(tiny), tokens)
    assert np.abs(theirs - before).max() > 0.01 * np.abs(theirs).max()  # the difference would be seen
    for backend, limit in (("reference", 1e-4), ("cpu", 1e-3)):
        with caplog.at_level(logging.INFO, logger="octavo"):
            executor = harness.load(tiny.path, backend=backend, kv_dtype="f32", quantize=mode)
        # prompt rows: generated ones round activations to eight bits against 4-bit weights, which the op matrix bounds
        ours = harness.all_logits(executor, tokens, chunk=16)
        assert np.abs(ours - theirs).max() < limit * np.abs(theirs).max()
    layouts = {"int8": "2 q8_b32, 14 q8_g128", "int4": "2 q4_b32, 12 q4_g128, 2 q8_g128"}[mode]
    assert f"quantize {mode}: matrices: {layouts}" in caplog.text


def test_quantised_files_are_kept_and_one_line_says_so(tmp_path, caplog):
    from tests.models import harness
    from tests.tiny_models import write_tiny

    tiny = write_tiny(tmp_path / "m", fmt="gguf", quant="Q8_0", **SHAPE)
    tokens = list(range(20))
    expected = harness.all_logits(harness.load(tiny.path), tokens)
    with caplog.at_level(logging.INFO, logger="octavo"):
        kept = harness.load(tiny.path, quantize="int4")
    np.testing.assert_array_equal(harness.all_logits(kept, tokens), expected)
    lines = [r.message for r in caplog.records if "quantize" in r.message]
    assert len(lines) == 1 and "kept as they are in the file (q8_b32)" in lines[0]
