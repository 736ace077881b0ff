"""What every scheme shares: building planes from file blocks, working through rows in pieces, and the plain inverse.

`dequantize` spells out the meaning of a PackedTensor (ops/api.py) in float32; it is what checks and slow paths use.
Pure functions, no state. Not here: any one file format (float_types.py, blocks32.py, k_quants.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.api import Layout, PackedTensor

#: Values per block of each quantised layout.
BLOCK_SIZES: dict[Layout, int] = {"q4_b32": 32, "q8_b32": 32, "q8_b16": 16}

#: Values worked on at once where temporaries are needed: a few MB, whatever the size of the matrix.
_PIECE = 1 << 20


def row_pieces(rows: int, cols: int) -> Iterator[slice]:
    """Slices over the rows [0, rows) of about a million values each."""
    step = max(1, _PIECE // max(cols, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def blocks_of(raw: memoryview, dtype: np.dtype[Any], rows: int) -> npt.NDArray[Any]:
    """The raw bytes as [rows, blocks per row] of the block's record type; a view."""
    return np.frombuffer(raw, dtype).reshape(rows, -1)


def plane(blocks: npt.NDArray[Any], field: str, dtype: str) -> npt.NDArray[Any]:
    """One field of all blocks, contiguous along K: [N, blocks * items of `dtype` in the field]."""
    return np.ascontiguousarray(blocks[field]).view(dtype)


def dequantize(packed: PackedTensor) -> npt.NDArray[np.float32]:
    """float32 [N, K]: the values of any layout, `scale * (q - zero) + offset` rounded once per operation."""
    out = np.empty(packed.shape, np.float32)
    with np.errstate(all="ignore"):  # a damaged file may hold NaN or inf scales: the values are then NaN or inf
        for rows in row_pieces(*packed.shape):
            out[rows] = _values(packed, rows)
    return out


def _values(packed: PackedTensor, rows: slice) -> npt.NDArray[np.float32]:
    data = packed.data[rows]
    if packed.layout == "f32":
        return data
    if packed.layout == "f16":
        return data.view(np.float16).astype(np.float32)
    if packed.layout == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    block = BLOCK_SIZES[packed.layout]
    count, blocks = data.shape[0], packed.shape[1] // block
    if packed.layout == "q4_b32":
        pairs = data.reshape(count, blocks, 16)
        q = np.concatenate([pairs & 0x0F, pairs >> 4], axis=2)
    else:
        q = data.reshape(count, blocks, block)
    assert packed.scale is not None
    values = q.astype(np.float32) - np.float32(packed.zero)
    values *= packed.scale[rows].astype(np.float32)[:, :, None]
    if packed.offset is not None:
        values += packed.offset[rows].astype(np.float32)[:, :, None]
    return values.reshape(count, packed.shape[1])


def permute_rows(packed: PackedTensor, index: npt.NDArray[np.int64]) -> PackedTensor:
    """Row r of the result is row index[r]; quantisation is along K, so rows move without being touched."""

    def moved(plane: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
        return None if plane is None else plane[index]

    return replace(
        packed, shape=(len(index), packed.shape[1]), data=packed.data[index], scale=moved(packed.scale), offset=moved(packed.offset)
    )
