"""Attention as the formula says it: every score at once (Vaswani et al. 2017).

    out = softmax(q k^T / sqrt(D)) v,   each row sees itself and what came before it

The matrix of scores is L x L for each head, so memory and time grow with the square of the length.
Not here: ways round that (efficient.py, flash.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def attention(q: Array, k: Array, v: Array) -> Array:
    """[H, L, D] from queries [H, L, D] and keys, values [KH, L, D], in the dtype of q (float32, or float64 as the judge).

    Grouped heads (Ainslie et al. 2023): query head h reads KV head h // (H / KH).
    """
    heads, length, dim = q.shape
    q = q.reshape(len(k), -1, length, dim)  # the query heads of one KV head lie together: [KH, H / KH, L, D]
    scores = q @ k[:, None].swapaxes(-1, -2)  # [KH, H / KH, L, L]
    scores *= dim**-0.5
    scores[..., later_keys(0, length, length)] = -np.inf
    return (softmax(scores) @ v[:, None]).reshape(heads, length, dim)


def later_keys(first: int, last: int, keys: int) -> npt.NDArray[np.bool_]:
    """True where key j lies after row i and must not be seen: [last - first, keys], rows first .. last - 1."""
    return np.arange(keys) > np.arange(first, last)[:, None]


def softmax(scores: Array) -> Array:
    """exp(s) / sum(exp(s)) along the last axis, in place. The largest score is subtracted first: exp(1000) overflows."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
