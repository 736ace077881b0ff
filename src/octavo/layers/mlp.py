"""GatedMLP: down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020), gate and up in one packed weight.

Not here: mixtures of experts, other activations.
"""

from __future__ import annotations

from octavo.layers.linear import Linear
from octavo.ops.api import Array, ForwardBatch, Ops


class GatedMLP:
    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.gate_up_proj = Linear(ops)
        self.down_proj = Linear(ops)

    def __call__(self, x: Array, batch: ForwardBatch) -> Array:
        """float32 [T, hidden] -> [T, hidden]."""
        gate_up = self.gate_up_proj(x, batch.num_generated)
        return self.down_proj(self.ops.silu_mul(gate_up), batch.num_generated)
