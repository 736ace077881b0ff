"""DecoderLayer: the pre-norm residual block that Llama and its relatives repeat.

The residual stream x is updated in place; everything else a layer makes lives in an arena scope that closes with it, so
the memory of a step does not grow with depth. Owner of its parts, whose weights are set at load. Not here: what an op does.
"""

from __future__ import annotations

from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.model_config import ModelConfig
from octavo.ops.api import Array, ForwardBatch, Ops


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, rope: Any, ops: Ops) -> None:
        self.ops = ops
        self.name = f"layers.{layer}"
        self.input_norm = RMSNorm(ops, config.rms_norm_eps)
        self.attn = Attention(config, layer, rope, ops)
        self.post_norm = RMSNorm(ops, config.rms_norm_eps)
        self.mlp = GatedMLP(ops)

    def __call__(self, x: Array, batch: ForwardBatch) -> Array:
        """float32 [T, hidden], returned updated in place."""
        with self.ops.arena.scope():
            attn_out = self.attn(self.input_norm(x), batch)
            tap(self.ops, batch, f"{self.name}.attn", attn_out)
            mlp_out = self.mlp(self.post_norm.after_add(x, attn_out), batch)
            tap(self.ops, batch, f"{self.name}.mlp", mlp_out)
            self.ops.add_(x, mlp_out)
        tap(self.ops, batch, self.name, x)
        return x


def tap(ops: Ops, batch: ForwardBatch, name: str, x: Array) -> None:
    """Keep a copy of x for a reader who asked for `name` (ops/api.py: Taps)."""
    if batch.taps is not None and name in batch.taps.names:
        batch.taps.values[name] = ops.to_numpy(x).copy()
