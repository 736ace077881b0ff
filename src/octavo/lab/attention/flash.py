"""Attention in tiles: the softmax of a row is built up while its keys go by, and no row of scores ever exists.

The softmax needs the largest score and the sum of exponentials of the whole row. Both can be kept up to date (online
softmax: Milakov & Gimelshein 2018): when a tile brings a larger maximum, what was summed so far is scaled down by
exp(old maximum - new maximum). FlashAttention (Dao et al. 2022) does this for tiles that fit the fast memory next to the
arithmetic. Here NumPy plays its part: same order of operations, same small memory, none of the speed of a fused kernel.
"""

from __future__ import annotations

import numpy as np

from octavo.lab.attention.naive import Array

TILE = 128


def attention(q: Array, k: Array, v: Array, tile: int = TILE) -> Array:
    """As naive.attention: q [H, L, D], k and v [KH, L, D] to [H, L, D]."""
    heads, length, dim = q.shape
    q = q.reshape(len(k), -1, length, dim)
    out = np.empty_like(q)
    for first in range(0, length, tile):
        last = min(first + tile, length)
        out[:, :, first:last] = _rows(q[:, :, first:last], k[:, None, :last], v[:, None, :last], first, tile)
    return out.reshape(heads, length, dim)


def _rows(q: Array, k: Array, v: Array, first: int, tile: int) -> Array:
    """The rows `first` and on, over all their keys, tile by tile."""
    rows, keys = q.shape[-2], k.shape[-2]
    largest = np.full((*q.shape[:-1], 1), -np.inf, q.dtype)  # of the scores seen so far
    total = np.zeros_like(largest)  # of exp(score - largest)
    mixed = np.zeros_like(q)  # of exp(score - largest) * v
    for start in range(0, keys, tile):
        end = min(start + tile, keys)
        scores = q @ k[:, :, start:end].swapaxes(-1, -2)
        scores *= q.shape[-1] ** -0.5  # scaling q once is cheaper, and rounds differently where sqrt(D) is no power of two
        if end > first:  # the tile on the diagonal: some of its keys lie after some of the rows
            scores[..., np.arange(start, end) > np.arange(first, first + rows)[:, None]] = -np.inf
        new = np.maximum(largest, scores.max(axis=-1, keepdims=True))
        weights = np.exp(scores - new)
        shrink = np.exp(largest - new)  # 0 the first time
        total = total * shrink + weights.sum(axis=-1, keepdims=True)
        mixed = mixed * shrink + weights @ v[:, :, start:end]
        largest = new
    return mixed / total
