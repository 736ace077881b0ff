"""The same three ways in torch, and torch's own: torch.nn.functional.scaled_dot_product_attention.

Read naive.py, efficient.py and flash.py first: the lines correspond. q is [H, L, D], k and v are [KH, L, D], float32.
Not here: any device but the CPU; timing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = _per_query_head(q, k), _per_query_head(q, v)
    scores = (q @ k.transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)
    scores.masked_fill_(_later_keys(0, q.shape[1], q.shape[1]), -torch.inf)
    return torch.softmax(scores, -1) @ v


def efficient(q: Tensor, k: Tensor, v: Tensor, chunk: int = 128) -> Tensor:
    k, v = _per_query_head(q, k), _per_query_head(q, v)
    out = torch.empty_like(q)
    for first in range(0, q.shape[1], chunk):
        last = min(first + chunk, q.shape[1])
        scores = (q[:, first:last] @ k[:, :last].transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)
        scores.masked_fill_(_later_keys(first, last, last), -torch.inf)
        out[:, first:last] = torch.softmax(scores, -1) @ v[:, :last]
    return out


def flash(q: Tensor, k: Tensor, v: Tensor, tile: int = 128) -> Tensor:
    k, v = _per_query_head(q, k), _per_query_head(q, v)
    out = torch.empty_like(q)
    for first in range(0, q.shape[1], tile):
        last = min(first + tile, q.shape[1])
        rows = q[:, first:last]
        largest = torch.full((*rows.shape[:-1], 1), -torch.inf)
        total, mixed = torch.zeros_like(largest), torch.zeros_like(rows)
        for start in range(0, last, tile):
            end = min(start + tile, last)
            scores = (rows @ k[:, start:end].transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)
            if end > first:
                scores.masked_fill_(_later_keys(first, last, end)[:, start:], -torch.inf)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, shrink = torch.exp(scores - new), torch.exp(largest - new)
            total = total * shrink + weights.sum(-1, keepdim=True)
            mixed = mixed * shrink + weights @ v[:, start:end]
            largest = new
        out[:, first:last] = mixed / total
    return out


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One call; on a CPU torch runs a fused kernel of the flash kind."""
    return scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=q.shape[0] != k.shape[0])[0]


def _per_query_head(q: Tensor, x: Tensor) -> Tensor:
    """[KH, L, D] to [H, L, D]: each KV head once for every query head that reads it."""
    return x.repeat_interleave(q.shape[0] // x.shape[0], 0)


def _later_keys(first: int, last: int, keys: int) -> Tensor:
    return torch.arange(keys) > torch.arange(first, last)[:, None]
