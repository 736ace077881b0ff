"""Attention with little memory: a few rows at a time.

Rows do not depend on each other, so a chunk of queries can be finished before the next one begins: the scores take
CHUNK x L instead of L x L (Rabe & Staats 2021 go further and chunk the keys too). Being causal, a chunk needs no key
after its own last row, which saves half of the work as well.
Not here: tiles of keys (flash.py).
"""

from __future__ import annotations

import numpy as np

from octavo.lab.attention.naive import Array, later_keys, softmax

CHUNK = 128


def attention(q: Array, k: Array, v: Array, chunk: int = CHUNK) -> Array:
    """As naive.attention: q [H, L, D], k and v [KH, L, D] to [H, L, D]."""
    heads, length, dim = q.shape
    q = q.reshape(len(k), -1, length, dim)
    out = np.empty_like(q)
    for first in range(0, length, chunk):
        last = min(first + chunk, length)
        scores = q[:, :, first:last] @ k[:, None, :last].swapaxes(-1, -2)  # [KH, H / KH, chunk, last]
        scores *= dim**-0.5
        scores[..., later_keys(first, last, last)] = -np.inf
        out[:, :, first:last] = softmax(scores) @ v[:, None, :last]
    return out.reshape(heads, length, dim)
