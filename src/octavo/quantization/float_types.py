"""F32, F16 and BF16: no quantisation, so the packed matrix is a view of the file. GGUF and safetensors share this file.

Pure functions, no state. Not here: converting between the three, which is the business of ops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.api import Layout, PackedTensor


def _matrix(raw: memoryview, shape: tuple[int, int], dtype: str, layout: Layout) -> PackedTensor:
    data: npt.NDArray[Any] = np.frombuffer(raw, dtype).reshape(shape)
    # A view wherever the bytes lie on a multiple of the item's size, which both formats ask for but do not enforce.
    return PackedTensor(layout, shape, np.require(data, requirements="A"))


def f32(raw: memoryview, shape: tuple[int, int]) -> PackedTensor:
    return _matrix(raw, shape, "<f4", "f32")


def f16(raw: memoryview, shape: tuple[int, int]) -> PackedTensor:
    return _matrix(raw, shape, "<u2", "f16")


def bf16(raw: memoryview, shape: tuple[int, int]) -> PackedTensor:
    return _matrix(raw, shape, "<u2", "bf16")
