"""Embedding: token ids to rows of a matrix, which a tied output head shares. Owner of its weight, set once at load.

Not here: the output head (layers/linear.py), dequantising (ops/).
"""

from __future__ import annotations

from typing import Any

from octavo.ops.api import Array, ForwardBatch, Ops


class Embedding:
    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.weight: Any = None

    def __call__(self, batch: ForwardBatch) -> Array:
        """float32 [T, hidden]: one row for each of batch.token_ids."""
        return self.ops.embedding(batch.token_ids, self.weight)
