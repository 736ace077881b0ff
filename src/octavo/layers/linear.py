"""Linear: a matrix multiplication with an optional bias, over one packed weight.

Owner of the weight: this object (set once at load). Not here: layouts and arithmetic, which belong to the backend.
"""

from __future__ import annotations

from typing import Any

from octavo.ops.api import Array, Ops


class Linear:
    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.weight: Any = None

    def __call__(self, x: Array, num_generated: int) -> Array:
        """float32 [T, K] -> [T, N]. Rows below `num_generated` are of kind GENERATED (docs/numerics.md)."""
        return self.ops.linear(x, self.weight, num_generated)
