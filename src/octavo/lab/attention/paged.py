"""The engine's own attention on the same inputs: K and V lie in blocks of 16 tokens, wherever there was room.

The keys of a sequence are found through its block table. Here the table is shuffled on purpose, so that no two
neighbouring blocks are neighbours in memory: the result must be the same.
Owner of the KV pool it allocates. Not here: the kernel (native/), its specification (ops/reference/attention.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.config import EngineConfig
from octavo.lab.attention.naive import Array
from octavo.model_config import RopeConfig
from octavo.ops.api import ForwardBatch, KVDtype, KVSpec, OpNeeds
from octavo.ops.registry import make_ops

BLOCK_SIZE = 16
#: Divides every rotary angle: what is left turns no float32 by a bit, so that q and k enter the kernel as they are.
_NO_ANGLE = 1e30


class PagedAttention:
    """One layer's pool of one sequence of `length` tokens; call it with q [H, L, D] and k, v [KH, L, D].

    backend "auto": the native kernels, or the NumPy reference where there are none.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, length: int, kv_dtype: KVDtype = "f32", backend: Any = "auto") -> None:
        needs = OpNeeds(dim, heads, kv_heads, dim, kv_dtype, BLOCK_SIZE)
        self.ops = make_ops(EngineConfig(backend=backend, kv_dtype=kv_dtype, max_num_batched_tokens=length), needs)
        self.rope = self.ops.rope_table(RopeConfig(dim=dim, kind="linear", factor=_NO_ANGLE), length)
        self.heads, self.scale = heads, dim**-0.5
        num_blocks = -(-length // BLOCK_SIZE)
        spec = KVSpec(1, num_blocks, BLOCK_SIZE, kv_heads, dim, kv_dtype)
        self.batch = _one_sequence(length, np.random.default_rng(0).permutation(num_blocks), self.ops.alloc_kv(spec))
        #: What a call holds besides its input: the pool, the rotated q and the output, counted from their shapes. The
        #: kernel's own scratch, a row of scores for each thread, is not in it.
        self.counted_bytes = num_blocks * self.ops.kv_block_bytes(spec) + 2 * length * heads * dim * 4

    def __call__(self, q: Array, k: Array, v: Array) -> Array:
        """[H, L, D], a copy."""
        return self.by_head(self.run(fused(q, k, v)))

    def by_head(self, out: Array) -> Array:
        """[H, L, D], a copy, from what `run` returns."""
        return out.reshape(len(out), self.heads, -1).transpose(1, 0, 2).copy()

    def memory(self, call: Any) -> int:
        """Bytes of a call: counted, not measured."""
        return self.counted_bytes

    def run(self, qkv: Array) -> Array:
        """[L, H * D] from `fused` rows, valid until the next call: writes K and V to their blocks, then attends."""
        self.ops.begin_step(self.batch.num_rows)
        q = self.ops.rope_kv_write(qkv, self.rope, 0, self.batch, 0, self.heads)
        out: Array = self.ops.attend(q, 0, self.batch, 0, self.scale)
        return out


def fused(q: Array, k: Array, v: Array) -> Array:
    """float32 [L, (H + 2 KH) D]: q, k and v of a token side by side, as a model's projection makes them."""
    return np.concatenate([x.transpose(1, 0, 2).reshape(x.shape[1], -1) for x in (q, k, v)], axis=1).astype(np.float32)


def _one_sequence(length: int, blocks: Array, kv: Any) -> ForwardBatch:
    """All tokens of one prompt in one step; token t lies in blocks[t // 16]."""
    positions = np.arange(length, dtype=np.int32)
    slots = blocks[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return ForwardBatch(
        token_ids=np.zeros(length, np.int32),
        positions=positions,
        query_start_loc=np.array([0, length], np.int32),
        seq_lens=np.array([length], np.int32),
        block_tables=(blocks[None].astype(np.int32),),
        slot_mapping=(slots,),
        num_generated=0,
        logits_rows=np.array([length - 1], np.int32),
        num_generated_logits=0,
        kv=(kv,),
    )
