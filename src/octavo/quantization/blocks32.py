"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: ggml's blocks of 32 values with one float16 scale (and one float16 minimum).

The block layouts are those of ggml-common.h (block_q4_0 and so on). Q4_* already order their nibbles as q4_b32 does,
so what comes out is views of the file: nothing is computed or copied, scales stay float16, the transcoding is exact.
Pure functions, no state. Not here: 256-value super-blocks (k_quants.py).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.ops.api import PackedTensor
from octavo.quantization.packed import blocks_of, plane, row_pieces

_Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
_Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])


def q4_0(raw: memoryview, shape: tuple[int, int]) -> PackedTensor:
    """value = d * (q - 8)"""
    blocks = blocks_of(raw, _Q4_0, shape[0])
    return PackedTensor("q4_b32", shape, blocks["qs"], blocks["d"], zero=8)


def q4_1(raw: memoryview, shape: tuple[int, int]) -> PackedTensor:
    """value = d * q + m"""
    blocks = blocks_of(raw, _Q4_1, shape[0])
    return PackedTensor("q4_b32", shape, blocks["qs"], blocks["d"], blocks["m"])


def q8_0(raw: memoryview, shape: tuple[int, int]) -> PackedTensor:
    """value = d * q"""
    blocks = blocks_of(raw, _Q8_0, shape[0])
    return PackedTensor("q8_b32", shape, blocks["qs"], blocks["d"])


def _five_bits(blocks: npt.NDArray[np.void], shape: tuple[int, int]) -> npt.NDArray[np.int8]:
    """int8 [N, K] in [0, 31]: four bits from the nibbles, the fifth of value i from bit i of qh (little-endian)."""
    out = np.empty((shape[0], shape[1] // 32, 32), np.uint8)
    for rows in row_pieces(*shape):
        low, high = blocks["qs"][rows], np.unpackbits(blocks["qh"][rows], axis=2, bitorder="little")
        out[rows, :, :16] = low & 0x0F
        out[rows, :, 16:] = low >> 4
        out[rows] |= high << 4
    return out.reshape(shape).view(np.int8)


def q5_0(raw: memoryview, shape: tuple[int, int]) -> PackedTensor:
    """value = d * (q - 16); stored centred, so that the layout's zero is 0."""
    blocks = blocks_of(raw, _Q5_0, shape[0])
    q = _five_bits(blocks, shape)
    q -= 16
    return PackedTensor("q8_b32", shape, q, plane(blocks, "d", "<f2"))


def q5_1(raw: memoryview, shape: tuple[int, int]) -> PackedTensor:
    """value = d * q + m"""
    blocks = blocks_of(raw, _Q5_1, shape[0])
    return PackedTensor("q8_b32", shape, _five_bits(blocks, shape), plane(blocks, "d", "<f2"), plane(blocks, "m", "<f2"))
