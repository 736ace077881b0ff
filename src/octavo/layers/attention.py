"""Attention: grouped-query attention (Ainslie et al. 2023) over the paged KV pool, with rotary positions.

Owner of its projections. The KV it writes and reads belongs to the backend; where a row's KV goes, and which blocks it
sees, comes with the batch. Not here: masks (attention is causal by position), anything about requests.
"""

from __future__ import annotations

from typing import Any

from octavo.layers.linear import Linear
from octavo.model_config import ModelConfig
from octavo.ops.api import Array, ForwardBatch, Ops


class Attention:
    def __init__(self, config: ModelConfig, layer: int, rope: Any, ops: Ops) -> None:
        self.ops = ops
        self.rope = rope
        #: Which KV pool and block table are its own (layers with the same window share them), and its number in there.
        self.group, self.layer = config.kv_place(layer)
        self.num_heads = config.num_heads
        self.scale = config.head_dim**-0.5
        self.window = config.sliding_windows[layer] if config.sliding_windows else None
        self.qkv_proj = Linear(ops)
        self.o_proj = Linear(ops)

    def __call__(self, x: Array, batch: ForwardBatch) -> Array:
        """float32 [T, hidden] -> [T, hidden]; writes k and v of every row to the pool first, so that a row sees itself."""
        qkv = self.qkv_proj(x, batch.num_generated)
        q = self.ops.rope_kv_write(qkv, self.rope, self.layer, batch, self.group, self.num_heads)
        out = self.ops.attend(q, self.layer, batch, self.group, self.scale, self.window)
        return self.o_proj(out, batch.num_generated)
