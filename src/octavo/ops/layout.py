"""Reading PackedTensors, half-precision bits and int8 vectors: what the reference and the torch backend share.

Stateless. The native backend has its own packing (ops/cpu); file formats are transcoded into these layouts by
quantization/. Not here: layouts of a backend's own, anything about KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.api import Layout, PackedTensor

Float32Array = npt.NDArray[np.float32]

#: Elements along K that share a scale; 0: the layout has none.
BLOCK: dict[Layout, int] = {"f32": 0, "f16": 0, "bf16": 0, "q4_b32": 32, "q8_b32": 32, "q8_b16": 16, "q4_g128": 128, "q8_g128": 128}
_DATA_DTYPE: dict[Layout, type[Any]] = {
    "f32": np.float32, "f16": np.uint16, "bf16": np.uint16, "q4_b32": np.uint8, "q8_b32": np.int8, "q8_b16": np.int8,
    "q4_g128": np.uint8, "q8_g128": np.int8,
}  # fmt: skip
#: Layouts of two values a byte; the halves of a byte are 16 apart, whatever shares a scale.
NIBBLES = frozenset({"q4_b32", "q4_g128"})
#: Elements dequantised at once, so that the temporaries stay in the cache.
_CHUNK_ELEMENTS = 1 << 20


def dequantize(packed: PackedTensor) -> Float32Array:
    """float32 [N, K]: scale * (q - zero) + offset, each operation rounded to float32. Raises ValueError where the
    arrays do not fit the layout."""
    check_packed(packed)
    out = np.empty(packed.shape, np.float32)
    for rows in row_chunks(packed.shape):
        dequantize_rows(packed, rows, out[rows])
    return out


def dequantize_rows(packed: PackedTensor, rows: slice, out: Float32Array) -> None:
    """The same for some rows, into `out` [rows, K]."""
    data, block = packed.data[rows], BLOCK[packed.layout]
    if packed.layout == "f32":
        out[:] = data
    elif packed.layout == "f16":
        out[:] = data.view(np.float16)
    elif packed.layout == "bf16":
        out[:] = bf16_to_f32(data)
    else:
        data = data.reshape(data.shape[0], -1)
        q = unpack_nibbles(data) if packed.layout in NIBBLES else data
        blocks = out.reshape(out.shape[0], -1, block)
        np.subtract(q.reshape(blocks.shape), np.float32(packed.zero), out=blocks)
        assert packed.scale is not None  # check_packed
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged file may hold NaN or infinite scales: so be it
            blocks *= packed.scale[rows].astype(np.float32)[:, :, None]
            if packed.offset is not None:
                blocks += packed.offset[rows].astype(np.float32)[:, :, None]


def stack_rows(parts: Sequence[PackedTensor]) -> Float32Array:
    """The dequantised parts one below the other, float32 [sum of N, K]."""
    if not parts:
        raise ValueError("a weight needs at least one part")
    if len({part.shape[1] for part in parts}) != 1:
        raise ValueError(f"parts of one weight differ in K: {[part.shape for part in parts]}")
    out = np.empty((sum(part.shape[0] for part in parts), parts[0].shape[1]), np.float32)
    start = 0
    for part in parts:
        check_packed(part)
        for rows in row_chunks(part.shape):
            dequantize_rows(part, rows, out[start + rows.start : start + rows.stop])
        start += part.shape[0]
    return out


def row_chunks(shape: tuple[int, int]) -> Iterator[slice]:
    """Slices over the rows, of about a million elements each."""
    step = max(1, _CHUNK_ELEMENTS // max(1, shape[1]))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def unpack_nibbles(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """uint8 [N, K] of [N, K / 2]: low nibbles are the first half of each block of 32."""
    blocks = data.reshape(data.shape[0], -1, 16)
    return np.concatenate([blocks & 15, blocks >> 4], axis=2).reshape(data.shape[0], -1)


def check_packed(packed: PackedTensor) -> None:
    """Raises ValueError unless layout, shapes and dtypes agree: the last guard before memory is read by shape."""
    rows, cols = packed.shape
    if packed.layout not in BLOCK:
        raise ValueError(f"unknown layout {packed.layout!r}")
    block = BLOCK[packed.layout]
    if block and cols % block:
        raise ValueError(f"{packed.layout}: K = {cols} is not a multiple of {block}")
    expected = (rows, cols // 2 if packed.layout in NIBBLES else cols)
    by_block = (rows, cols // 32, 16 if packed.layout in NIBBLES else 32)
    shapes = (expected, by_block) if packed.layout in ("q4_b32", "q8_b32") else (expected,)
    if packed.data.shape not in shapes or packed.data.dtype != _DATA_DTYPE[packed.layout]:
        raise ValueError(f"{packed.layout}: data is {packed.data.dtype} {packed.data.shape}, "
                         f"expected {np.dtype(_DATA_DTYPE[packed.layout])} {expected}")  # fmt: skip
    if block and packed.scale is None:
        raise ValueError(f"{packed.layout}: scale is missing")
    for name, values in (("scale", packed.scale), ("offset", packed.offset)):
        if values is None:
            continue
        if not block:
            raise ValueError(f"{packed.layout} has no {name}")
        if values.shape != (rows, cols // block) or values.dtype not in (np.float16, np.float32):
            raise ValueError(f"{packed.layout}: {name} is {values.dtype} {values.shape}, expected a float of {(rows, cols // block)}")


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> Float32Array:
    """The values of bfloat16 bits: the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: Float32Array) -> npt.NDArray[np.uint16]:
    """bfloat16 bits, rounded to nearest, ties to even; NaN stays NaN (quiet), too large becomes infinite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)  # the carry would turn a NaN with a full mantissa into a number
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def quantize_int8(values: Float32Array) -> tuple[npt.NDArray[np.int8], Float32Array]:
    """q int8 [..., D] and scale float32 [...] of vectors [..., D]: x ~ scale * q, symmetric, |q| <= 127.

    The scale is max|x| / 127 rounded to a bfloat16, so that scale * q is exact and reading back and writing again changes
    nothing; 0 where it would be below the normal numbers; NaN where the vector holds an infinity or a NaN, or scale * 127
    would be infinite: the damage must show. q is x / scale rounded to nearest, ties to even.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        largest = np.abs(values).max(axis=-1).astype(np.float32)
        exact = largest / np.float32(127)
        scale = np.where(exact < np.finfo(np.float32).tiny, np.float32(0), bf16_to_f32(f32_to_bf16(exact)))
        scale[~np.isfinite(scale * np.float32(127))] = np.nan
        q = np.rint(values / scale[..., None])
    return np.where(scale[..., None] > 0, np.clip(q, -127, 127), 0).astype(np.int8), scale


def round_to(values: Float32Array, dtype: str) -> Float32Array:
    """`values` as float32 after a round trip through dtype ("f32", "f16", "bf16", or "int8": vectors along the last axis)."""
    if dtype == "int8":
        q, scale = quantize_int8(values)
        return q.astype(np.float32) * scale[..., None]
    if dtype == "bf16":
        return bf16_to_f32(f32_to_bf16(values))
    if dtype == "f16":
        with np.errstate(over="ignore"):  # too large becomes infinite, as in hardware
            return values.astype(np.float16).astype(np.float32)
    return values
