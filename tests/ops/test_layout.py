"""Half-precision bits against ml_dtypes, and the guard that checks PackedTensors before they are read."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.ops import layout
from octavo.ops.api import PackedTensor
from tests.ops.op_oracle import random_packed

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
SPECIAL = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, 3.3961e38, -3.4e38, 1.00390625, 1.01171875], np.float32)


def test_bfloat16_bits_equal_ml_dtypes():
    rng = np.random.default_rng(0)
    values = np.concatenate([SPECIAL, rng.integers(0, 2**32, 200_000, np.uint64).astype(np.uint32).view(np.float32)])
    with np.errstate(invalid="ignore"):  # NaN
        expected = values.astype(ml_dtypes.bfloat16)
    ours = layout.f32_to_bf16(values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(ours[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(layout.bf16_to_f32(ours[nan])).all() and nan.sum() > 100
    every = np.arange(2**16, dtype=np.uint16)
    np.testing.assert_array_equal(layout.bf16_to_f32(every), every.view(ml_dtypes.bfloat16).astype(np.float32))


def test_a_nan_with_a_full_mantissa_stays_nan():
    assert np.isnan(layout.bf16_to_f32(layout.f32_to_bf16(np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)))).all()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_rounding_is_idempotent_and_keeps_shape(dtype):
    values = np.random.default_rng(1).standard_normal((3, 4, 5)).astype(np.float32)[:, ::2]
    once = layout.round_to(values, dtype)
    assert once.dtype == np.float32 and once.shape == values.shape
    np.testing.assert_array_equal(layout.round_to(once, dtype), once)
    np.testing.assert_allclose(once, values, rtol={"f32": 0, "f16": 2.0**-11, "bf16": 2.0**-8}[dtype])


def test_too_large_for_half_precision_is_infinite():
    assert layout.round_to(np.array([1e5, -1e5], np.float32), "f16").tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q4_b32", "q8_b32", "q8_b16", "q4_g128", "q8_g128"])
def test_many_rows_are_dequantised_piece_by_piece(kind, monkeypatch):
    monkeypatch.setattr(layout, "_CHUNK_ELEMENTS", 200)
    packed, values = random_packed(np.random.default_rng(2), kind, 23, 128)
    np.testing.assert_allclose(layout.dequantize(packed), values, rtol=1e-6)


def _q8(**changes):
    fields = {"layout": "q8_b32", "shape": (4, 64), "data": np.zeros((4, 64), np.int8), "scale": np.ones((4, 2), np.float32)}
    return PackedTensor(**{**fields, **changes})


@pytest.mark.parametrize(
    "bad",
    [
        _q8(layout="q5_k"), _q8(shape=(5, 64)), _q8(shape=(4, 63)), _q8(scale=None), _q8(scale=np.ones((4, 1), np.float32)),
        _q8(scale=np.ones((4, 2), np.int8)), _q8(offset=np.ones((2, 4), np.float32)), _q8(data=np.zeros((4, 64), np.uint8)),
        _q8(layout="f32"), _q8(layout="f32", data=np.zeros((4, 64), np.float32)),
        _q8(layout="q4_b32", data=np.zeros((4, 64), np.uint8)), _q8(layout="q8_b16"), _q8(data=np.zeros((4, 4, 16), np.int8)),
        _q8(layout="q8_g128", scale=np.ones((4, 1), np.float32)), _q8(layout="q8_g128", shape=(4, 128), data=np.zeros((4, 128), np.int8)),
    ],
)  # fmt: skip
def test_inconsistent_tensors_are_refused(bad):
    with pytest.raises(ValueError):
        layout.dequantize(bad)


def test_a_weight_needs_parts():
    with pytest.raises(ValueError, match="at least one part"):
        layout.stack_rows([])
