"""Float weights to 4 or 8 bits when a model is loaded (`quantize`): groups of 128 inputs with a scale, and for 4 bits an offset.

This is the specification. 8 bits: symmetric, value = scale * q with q in -127..127. 4 bits: value = scale * q + offset with
q in 0..15, rounded to nearest; of a few ranges, each refined by least squares for the q it gives, a group takes the
one with the smallest squared error. A matrix whose K is no multiple of 128 gets groups of 32; of 32 neither: it is left alone.
A group that holds NaN or infinity becomes NaN: the damage must show. Pure functions; work goes in pieces of a million values.
Not here: which weights (loading/weights.py), formats of files (blocks32.py, k_quants.py).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.api import Layout, PackedTensor
from octavo.ops.layout import dequantize_rows
from octavo.quantization.packed import row_pieces

Floats = npt.NDArray[np.float32]
FLOATS = frozenset({"f32", "f16", "bf16"})
#: Ranges tried for 4 bits, as parts of a group's own: a few clipped values may buy a finer step.
SHRINK = (1.0, 0.92, 0.84)
#: Scales are stored as halves where the largest weight lies between these: a half has the precision then.
_HALF = (1e-2, 3e4)


def group_size(cols: int) -> int:
    """128 or 32, or 0 where neither divides K."""
    return next((size for size in (128, 32) if cols % size == 0), 0)


def quantize(packed: PackedTensor, bits: int, threads: int = 1) -> PackedTensor:
    """A float matrix [N, K] in q4_g128 or q8_g128 (q4_b32 or q8_b32 for groups of 32). `bits`: 4 or 8.

    Raises ValueError for a matrix that is not of floats, or whose K is no multiple of 32.
    """
    rows, cols = packed.shape
    group = group_size(cols)
    if packed.layout not in FLOATS or not group or bits not in (4, 8):
        raise ValueError(f"a matrix of layout {packed.layout} and K = {cols} cannot be quantised to {bits} bits")
    data: npt.NDArray[Any] = np.empty((rows, cols // 2), np.uint8) if bits == 4 else np.empty((rows, cols), np.int8)
    pieces = list(row_pieces(rows, cols))
    with ThreadPoolExecutor(threads) as pool:
        largest = max(pool.map(lambda piece: _largest(_values(packed, piece, cols)), pieces), default=0.0)
        dtype = np.float16 if _HALF[0] <= largest <= _HALF[1] else np.float32
        scale = np.empty((rows, cols // group), dtype)
        offset = np.empty_like(scale) if bits == 4 else None

        def work(piece: slice) -> None:
            x = _values(packed, piece, group)
            if offset is None:
                q, factor = eight_bits(x, dtype)
                data[piece] = q.reshape(-1, cols)
            else:
                codes, factor, shift = four_bits(x, dtype)
                halves = codes.reshape(-1, 2, 16)
                data[piece] = (halves[:, 0] | (halves[:, 1] << 4)).reshape(-1, cols // 2)
                offset[piece] = shift.reshape(-1, cols // group)
            scale[piece] = factor.reshape(-1, cols // group)

        list(pool.map(work, pieces))  # raises what a piece raised
    layout: Layout = ("q4_g128" if bits == 4 else "q8_g128") if group == 128 else ("q4_b32" if bits == 4 else "q8_b32")
    return PackedTensor(layout, packed.shape, data, scale, offset)


def _values(packed: PackedTensor, rows: slice, width: int) -> Floats:
    out = np.empty((rows.stop - rows.start, packed.shape[1]), np.float32)
    dequantize_rows(packed, rows, out)
    return out.reshape(-1, width)


def _largest(x: Floats) -> float:
    return float(np.max(np.abs(x), where=np.isfinite(x), initial=0.0))


def eight_bits(x: Floats, dtype: type[np.floating[Any]]) -> tuple[npt.NDArray[np.int8], npt.NDArray[Any]]:
    """x [groups, size] -> q int8 [groups, size], scale [groups] of `dtype`."""
    with np.errstate(all="ignore"):
        scale = (np.abs(x).max(axis=1) / np.float32(127)).astype(dtype)
        scale[~np.isfinite(scale)] = np.nan
        q = np.rint(x * _inverse(scale)[:, None])
    return np.nan_to_num(np.clip(q, -127, 127)).astype(np.int8), scale


def four_bits(x: Floats, dtype: type[np.floating[Any]]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any], npt.NDArray[Any]]:
    """x [groups, size] -> q uint8 [groups, size] in 0..15, scale and offset [groups] of `dtype`."""
    size = np.float32(x.shape[1])
    codes = np.zeros(x.shape, np.uint8)
    scale, offset = (np.full(len(x), np.nan, dtype) for _ in range(2))
    error = np.full(len(x), np.inf, np.float32)
    with np.errstate(all="ignore"):
        low, high, total = x.min(axis=1), x.max(axis=1), x.sum(axis=1)
        for part in SHRINK:
            step = (high - low) * np.float32(part / 15)
            q = _codes(x, step, (high + low) / 2 - np.float32(7.5) * step)
            # the line through (q, x) that leaves the smallest squares
            sum_q, sum_qq, sum_qx = q.sum(axis=1), np.einsum("ij,ij->i", q, q), np.einsum("ij,ij->i", q, x)
            spread = size * sum_qq - sum_q * sum_q
            fitted = np.where(spread > 0, (size * sum_qx - sum_q * total) / spread, step).astype(dtype)
            shift = ((total - fitted.astype(np.float32) * sum_q) / size).astype(dtype)
            q = _codes(x, fitted.astype(np.float32), shift.astype(np.float32))
            miss = q * fitted.astype(np.float32)[:, None] + shift.astype(np.float32)[:, None] - x
            found = np.einsum("ij,ij->i", miss, miss)
            better = found < error
            codes[better] = q[better].astype(np.uint8)
            scale[better], offset[better], error[better] = fitted[better], shift[better], found[better]
    return codes, scale, offset


def _codes(x: Floats, scale: Floats, offset: Floats) -> Floats:
    codes: Floats = np.clip(np.rint((x - offset[:, None]) * _inverse(scale)[:, None]), np.float32(0), np.float32(15))
    return codes


def _inverse(scale: npt.NDArray[Any]) -> Floats:
    """1 / scale in float32, 0 for 0."""
    wide = scale.astype(np.float32)
    out = np.zeros_like(wide)
    np.divide(np.float32(1), wide, out=out, where=wide != 0)
    return out
