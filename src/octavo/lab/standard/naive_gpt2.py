"""GPT-2 (Radford et al. 2019) from top to bottom, in NumPy, as plainly as it can be written.

`weights` are the arrays of a Hugging Face checkpoint by their names there. Its matrices are [inputs, outputs].
Not here: a KV cache, a batch, speed. The Llama family: naive_llama.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray, float32


def forward(weights: Mapping[str, Array], token_ids: Sequence[int], num_heads: int, eps: float = 1e-5) -> Array:
    """Logits [T, vocab]: row t says what may follow token t."""
    w = {name.removeprefix("transformer."): array for name, array in weights.items()}
    ids = np.asarray(token_ids)
    x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]  # what the token is, and where it stands
    layer = 0
    while f"h.{layer}.ln_1.weight" in w:
        h = f"h.{layer}"
        x = x + attention(w, h, layer_norm(w, f"{h}.ln_1", x, eps), num_heads)
        x = x + mlp(w, h, layer_norm(w, f"{h}.ln_2", x, eps))
        layer += 1
    x = layer_norm(w, "ln_f", x, eps)
    return x @ w["wte.weight"].T  # the embedding again: the output is tied to it


def attention(w: Mapping[str, Array], h: str, x: Array, num_heads: int) -> Array:
    tokens, width = x.shape
    qkv = linear(w, f"{h}.attn.c_attn", x)  # [T, 3 * width]: q, k and v in one product
    q, k, v = (part.reshape(tokens, num_heads, -1).transpose(1, 0, 2) for part in np.split(qkv, 3, axis=1))
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])  # [heads, T, T]
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)  # no token sees a later one
    mixed = softmax(scores) @ v
    return linear(w, f"{h}.attn.c_proj", mixed.transpose(1, 0, 2).reshape(tokens, width))


def mlp(w: Mapping[str, Array], h: str, x: Array) -> Array:
    return linear(w, f"{h}.mlp.c_proj", gelu(linear(w, f"{h}.mlp.c_fc", x)))


def linear(w: Mapping[str, Array], name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def layer_norm(w: Mapping[str, Array], name: str, x: Array, eps: float) -> Array:
    """Mean 0 and variance 1 for each token (Ba et al. 2016), then a learned scale and shift."""
    mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x: Array) -> Array:
    """The tanh approximation (Hendrycks & Gimpel 2016), which is what GPT-2 was trained with."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
