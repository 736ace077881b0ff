"""Paged attention and its KV pool in plain NumPy.

Owner of the pool: whoever called alloc_kv (the worker); its layout is known to this file alone.
Not here: the choice of blocks (engine), weights, the other ops (reference_ops.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.ops.api import ForwardBatch, KVSpec
from octavo.ops.layout import round_to

Float32Array = npt.NDArray[np.float32]

#: Scores held at once (float32): long prompts are attended in runs of rows.
_MAX_SCORES = 1 << 23


@dataclass(frozen=True, slots=True)
class ReferenceKV:
    """K and V of one group, float32 [layers, 2, blocks, KH, block_size, D] (0 is K, 1 is V), holding values that
    spec.dtype can represent."""

    spec: KVSpec
    pool: Float32Array

    @staticmethod
    def block_bytes(spec: KVSpec) -> int:
        return spec.num_layers * 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * 4  # float32 whatever spec.dtype

    @classmethod
    def allocate(cls, spec: KVSpec) -> ReferenceKV:
        shape = (spec.num_layers, 2, spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        return cls(spec, np.zeros(shape, np.float32))  # calloc: pages come when first written

    def write(self, layer: int, slots: npt.NDArray[np.int64], k: Float32Array, v: Float32Array) -> None:
        """k, v [T, KH, D] to their slots (block * block_size + offset in the block)."""
        block, offset = slots // self.spec.block_size, slots % self.spec.block_size
        self.pool[layer, 0, block, :, offset] = round_to(k, self.spec.dtype)
        self.pool[layer, 1, block, :, offset] = round_to(v, self.spec.dtype)

    def read(self, layer: int, blocks: npt.NDArray[np.int32]) -> tuple[Float32Array, Float32Array]:
        """K and V of the tokens of these blocks in order, [KH, blocks * block_size, D] each."""
        both = self.pool[layer][:, blocks]  # [2, blocks, KH, block_size, D]
        both = both.transpose(0, 2, 1, 3, 4).reshape(2, self.spec.num_kv_heads, -1, self.spec.head_dim)
        return both[0], both[1]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.pool[:, :, list(targets)] = self.pool[:, :, list(sources)]


def rotate(x: Float32Array, cos: Float32Array, sin: Float32Array) -> Float32Array:
    """Rotary embedding of x [T, heads, D] by cos, sin [T, 1, dim / 2]: dimension i < dim / 2 pairs with i + dim / 2;
    dimensions from dim on stay as they are."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def attend(
    q: Float32Array, kv: ReferenceKV, layer: int, batch: ForwardBatch, group: int, scale: float, window: int | None, softcap: float,
    out: Float32Array,
) -> None:  # fmt: skip
    """Fills out [T, H, D] from q [T, H, D], one segment of the batch after the other."""
    num_heads, block_size = q.shape[1], kv.spec.block_size
    starts = batch.query_start_loc
    for segment in range(len(starts) - 1):
        start, end = int(starts[segment]), int(starts[segment + 1])
        length = int(batch.seq_lens[segment])
        run = max(1, _MAX_SCORES // (num_heads * max(length, 1)))
        for row in range(start, end, run):
            rows = slice(row, min(row + run, end))
            positions = batch.positions[rows]
            first_key = 0 if window is None else max(0, int(positions[0]) - window + 1)
            first_block = first_key // block_size
            last_block = int(positions[-1]) // block_size
            k, v = kv.read(layer, batch.block_tables[group][segment, first_block : last_block + 1])
            key_positions = np.arange(first_block * block_size, (last_block + 1) * block_size)
            out[rows] = attend_rows(q[rows], k, v, positions, key_positions, scale, window, softcap)


def attend_rows(
    q: Float32Array, k: Float32Array, v: Float32Array, positions: npt.NDArray[np.int32], key_positions: npt.NDArray[np.int64],
    scale: float, window: int | None, softcap: float,
) -> Float32Array:  # fmt: skip
    """[n, H, D]: softmax(softcap(q . k * scale)) . v of n rows q [n, H, D] over m keys k, v [KH, m, D], where a row at
    position p sees the keys at positions (p - window, p] (Vaswani et al. 2017; grouped heads: Ainslie et al. 2023;
    softcap(s) = c * tanh(s / c): Gemma 2)."""
    rows, num_heads, dim = q.shape
    num_kv_heads = k.shape[0]
    # Query head h reads KV head h // (H / KH), so the heads of one KV head lie together: [KH, n * H / KH, D].
    grouped = q.reshape(rows, num_kv_heads, -1, dim).transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, dim)
    scores = (grouped @ k.transpose(0, 2, 1)) * np.float32(scale)
    if softcap:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    scores = scores.reshape(num_kv_heads, rows, -1, k.shape[1])
    hidden: npt.NDArray[np.bool_] = key_positions > positions[:, None]  # [n, m]
    if window is not None:
        hidden |= key_positions <= positions[:, None] - window
    np.copyto(scores, np.float32(-np.inf), where=hidden[None, :, None, :])
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    # What lies in the pool beyond a sequence is stale and may not be finite: weight 0 must mean 0.
    never_seen: npt.NDArray[np.bool_] = np.all(hidden, axis=0)
    v = np.where(never_seen[None, :, None], np.float32(0), v)
    mixed: Float32Array = weights.reshape(num_kv_heads, -1, k.shape[1]) @ v
    return mixed.reshape(num_kv_heads, rows, -1, dim).transpose(1, 0, 2, 3).reshape(rows, num_heads, dim)
