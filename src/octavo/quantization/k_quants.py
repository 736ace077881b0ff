"""Q4_K, Q5_K, Q6_K: ggml's super-blocks of 256 values, whose small blocks have integer scales under a float16 one.

Layouts from ggml-common.h (block_q4_K and so on); the six-bit scales are packed as get_scale_min_k4 reads them. A
block's scale is float16 times an integer below 2^7, which float32 holds exactly: the transcoding is exact too.
Pure functions, no state. Not here: 32-value blocks (blocks32.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.api import PackedTensor
from octavo.quantization.packed import blocks_of, row_pieces

_Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", (4, 32))])
_Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", (4, 32))])
_Q6_K = np.dtype([("ql", "u1", (2, 2, 32)), ("qh", "u1", (2, 32)), ("scales", "i1", 16), ("d", "<f2")])

Floats = npt.NDArray[np.float32]


def _scales_and_offsets(blocks: npt.NDArray[Any], shape: tuple[int, int]) -> tuple[Floats, Floats]:
    """float32 [N, K/32] each: d * scale and -(dmin * min) of the eight blocks in every super-block.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low six bits; bytes 8-11 hold the low four bits of
    scales (low nibble) and minima (high nibble) 4-7, whose upper two bits are the top bits of bytes 0-3 and 4-7.
    """
    scale, offset = (np.empty((shape[0], shape[1] // 32), np.float32) for _ in range(2))
    with np.errstate(all="ignore"):  # NaN and inf in a damaged file
        for rows in row_pieces(*shape):
            first, second, third = np.split(blocks["scales"][rows], 3, axis=2)
            six_bits = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=2)
            scale[rows] = (blocks["d"][rows].astype(np.float32)[:, :, None] * six_bits).reshape(scale[rows].shape)
            six_bits = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=2)
            offset[rows] = -(blocks["dmin"][rows].astype(np.float32)[:, :, None] * six_bits).reshape(scale[rows].shape)
    return scale, offset


def q4_k(raw: memoryview, shape: tuple[int, int]) -> PackedTensor:
    """value = d * scale * q - dmin * min; 32 bytes hold block 2g in the low nibbles and block 2g + 1 in the high ones."""
    blocks = blocks_of(raw, _Q4_K, shape[0])
    out = np.empty((*blocks.shape, 4, 2, 16), np.uint8)
    for rows in row_pieces(*shape):
        left, right = blocks["qs"][rows][..., :16], blocks["qs"][rows][..., 16:]
        out[rows, :, :, 0] = (left & 0x0F) | (right << 4)
        out[rows, :, :, 1] = (left >> 4) | (right & 0xF0)
    return PackedTensor("q4_b32", shape, out.reshape(shape[0], shape[1] // 2), *_scales_and_offsets(blocks, shape))


def q5_k(raw: memoryview, shape: tuple[int, int]) -> PackedTensor:
    """As Q4_K, with the fifth bit of value i of block b in bit b of qh[i]."""
    blocks = blocks_of(raw, _Q5_K, shape[0])
    out = np.empty((*blocks.shape, 4, 2, 32), np.uint8)
    bits = np.arange(8, dtype=np.uint8).reshape(4, 2, 1)
    for rows in row_pieces(*shape):
        low = blocks["qs"][rows]
        out[rows, :, :, 0] = low & 0x0F
        out[rows, :, :, 1] = low >> 4
        out[rows] |= ((blocks["qh"][rows][:, :, None, None, :] >> bits) & 1) << 4
    return PackedTensor("q8_b32", shape, out.reshape(shape).view(np.int8), *_scales_and_offsets(blocks, shape))


def q6_k(raw: memoryview, shape: tuple[int, int]) -> PackedTensor:
    """value = d * scale * (q - 32), blocks of 16; stored centred.

    Each half of 128 values: four runs of 32, whose low nibbles are ql[0] low, ql[1] low, ql[0] high, ql[1] high, and
    whose upper two bits are bit pairs 0 to 3 of qh.
    """
    blocks = blocks_of(raw, _Q6_K, shape[0])
    out = np.empty((*blocks.shape, 2, 4, 32), np.uint8)
    scale = np.empty((shape[0], shape[1] // 16), np.float32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    with np.errstate(all="ignore"):
        for rows in row_pieces(*shape):
            low = blocks["ql"][rows]
            out[rows, :, :, :2] = low & 0x0F
            out[rows, :, :, 2:] = low >> 4
            out[rows] |= ((blocks["qh"][rows][:, :, :, None, :] >> shifts) & 3) << 4
            out[rows] -= 32  # wraps, as two's complement wants
            factors = blocks["d"][rows].astype(np.float32)[:, :, None] * blocks["scales"][rows]
            scale[rows] = factors.reshape(scale[rows].shape)
    return PackedTensor("q8_b16", shape, out.reshape(shape).view(np.int8), scale)
