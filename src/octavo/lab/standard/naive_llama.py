"""Llama (Touvron et al. 2023), SmolLM2 among its kind, from top to bottom in NumPy, as plainly as it can be written.

`weights` are the arrays of a Hugging Face checkpoint by their names there. Its matrices are [outputs, inputs].
What changed since GPT-2: RMSNorm instead of LayerNorm, rotary positions instead of learned ones, fewer KV heads than
query heads, a gated MLP, no biases. Not here: a KV cache, a batch, speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray, float32
Weights = Mapping[str, Array]


def forward(w: Weights, token_ids: Sequence[int], num_heads: int, num_kv_heads: int, theta: float = 10000.0, eps: float = 1e-5) -> Array:
    """Logits [T, vocab]: row t says what may follow token t."""
    x = w["model.embed_tokens.weight"][np.asarray(token_ids)]
    layer = 0
    while f"model.layers.{layer}.input_layernorm.weight" in w:
        h = f"model.layers.{layer}"
        x = x + attention(w, f"{h}.self_attn", rms_norm(x, w[f"{h}.input_layernorm.weight"], eps), num_heads, num_kv_heads, theta)
        x = x + mlp(w, f"{h}.mlp", rms_norm(x, w[f"{h}.post_attention_layernorm.weight"], eps))
        layer += 1
    x = rms_norm(x, w["model.norm.weight"], eps)
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T  # small models tie the output to the embedding


def attention(w: Weights, name: str, x: Array, num_heads: int, num_kv_heads: int, theta: float) -> Array:
    tokens = len(x)
    q = rotate(heads(x @ w[f"{name}.q_proj.weight"].T, num_heads), theta)
    k = rotate(heads(x @ w[f"{name}.k_proj.weight"].T, num_kv_heads), theta)
    v = heads(x @ w[f"{name}.v_proj.weight"].T, num_kv_heads)
    k, v = (np.repeat(part, num_heads // num_kv_heads, axis=0) for part in (k, v))  # each KV head serves several query heads
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])  # [heads, T, T]
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)  # no token sees a later one
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = weights / weights.sum(axis=-1, keepdims=True) @ v
    return mixed.transpose(1, 0, 2).reshape(tokens, -1) @ w[f"{name}.o_proj.weight"].T


def mlp(w: Weights, name: str, x: Array) -> Array:
    """SwiGLU (Shazeer 2020): one product decides how much of the other passes."""
    gate, up = x @ w[f"{name}.gate_proj.weight"].T, x @ w[f"{name}.up_proj.weight"].T
    return (gate / (1.0 + np.exp(-gate)) * up) @ w[f"{name}.down_proj.weight"].T


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Length sqrt(width) for each token (Zhang & Sennrich 2019), then a learned scale."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def heads(x: Array, count: int) -> Array:
    """[T, count * D] to [count, T, D]."""
    return x.reshape(len(x), count, -1).transpose(1, 0, 2)


def rotate(x: Array, theta: float) -> Array:
    """Rotary positions (Su et al. 2021): the pair (i, i + D / 2) of token t turns by t * theta^(-2 i / D)."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)  # [T, D / 2]
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
