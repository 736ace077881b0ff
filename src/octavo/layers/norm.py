"""RMSNorm (Zhang & Sennrich 2019). Owner of its weight vector, set once at load. Not here: the sum itself (ops/)."""

from __future__ import annotations

from octavo.ops.api import Array, Ops


class RMSNorm:
    def __init__(self, ops: Ops, eps: float) -> None:
        self.ops = ops
        self.eps = eps
        self.weight: Array = None

    def __call__(self, x: Array) -> Array:
        """float32 [T, N] -> [T, N]."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def after_add(self, x: Array, y: Array) -> Array:
        """The norm of x + y, float32 [T, N]; the sum replaces x."""
        return self.ops.add_rms_norm(x, y, self.weight, self.eps)
