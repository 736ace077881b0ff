"""What every scheme shares: building planes from file blocks, and working through rows in pieces.

Pure functions, no state. Not here: any one file format (float_types.py, blocks32.py, k_quants.py), the way back to
float32 (ops/layout.py, some of which is passed on from here).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.api import PackedTensor
from octavo.ops.layout import dequantize, dequantize_rows, f32_to_bf16

__all__ = ["blocks_of", "dequantize", "dequantize_rows", "f32_to_bf16", "permute_rows", "plane", "row_pieces"]

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


def permute_rows(packed: PackedTensor, index: npt.NDArray[np.int64]) -> PackedTensor:
    """Row r of the result is row index[r]; quantisation is along K, so rows move without being touched."""

    def moved(plane: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
        return None if plane is None else plane[index]

    return replace(
        packed, shape=(len(index), packed.shape[1]), data=packed.data[index], scale=moved(packed.scale), offset=moved(packed.offset)
    )
