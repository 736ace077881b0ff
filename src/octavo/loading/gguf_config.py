"""Metadata of a GGUF file -> ModelConfig.

Keys as in the GGUF specification and llama.cpp's writer (gguf-py/gguf/constants.py). What would change the arithmetic
and is not understood is refused; an unknown key is reported in the log. Pure functions.
Not here: the tokenizer's metadata (tokenizer/gguf_vocab.py), names of weights (weights.py).
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.errors import shown
from octavo.loading.fields import Fields, check_model_config
from octavo.loading.gguf import GGUFFile
from octavo.loading.tensor_source import GGUFSource, vector
from octavo.model_config import ModelConfig, RopeConfig

KNOWN = ("llama", "qwen2")
ROPE_FREQS = "rope_freqs.weight"

#: Read below, or without effect on the arithmetic.
_USED = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "attention.causal", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "expert_count", "expert_used_count",
    "tensor_data_layout",
}  # fmt: skip

_DTYPES = {0: "float32", 1: "float16", 30: "bfloat16"}

_log = logging.getLogger(__name__)


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """Raises ModelLoadError naming the file and the key."""
    where = str(file.path)
    general = Fields(file.metadata, where)
    family = general.word("general.architecture")
    if family not in KNOWN:
        raise general.fail(f"the architecture {shown(family)} is not supported; supported are {', '.join(KNOWN)}")
    if general.get("split.count", 1) not in (0, 1):
        raise general.fail("one part of a split GGUF file; merge the parts first (llama-gguf-split --merge)")
    prefix = f"{family}."
    fields = Fields({k[len(prefix) :]: v for k, v in file.metadata.items() if k.startswith(prefix)}, f"{where}: {family}")
    _refuse_unsupported(fields)
    hidden = _per_layer_size(fields, "embedding_length", "hidden_size")
    heads = _per_layer_size(fields, "attention.head_count", "num_heads")
    head_dim = _head_dim(fields, hidden, heads)
    layers = fields.size("block_count", "num_layers")
    has = file.tensors.__contains__
    config = ModelConfig(
        architecture=family,
        vocab_size=_vocab_size(file, fields),
        hidden_size=hidden,
        intermediate_size=_per_layer_size(fields, "feed_forward_length", "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_per_layer_size(fields, "attention.head_count_kv", "num_kv_heads", heads),
        head_dim=head_dim,
        max_position=fields.size("context_length", "max_position"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope=_rope(file, fields, family, head_dim),
        tie_word_embeddings=not has("output.weight"),
        qkv_bias=family == "qwen2" or has("blk.0.attn_q.bias"),
        o_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_up.bias"),
        sliding_windows=_sliding_windows(fields, layers),
        dtype=_DTYPES.get(file.tensors["token_embd.weight"].type, "float32"),
    )
    return check_model_config(config, where)


def _refuse_unsupported(fields: Fields) -> None:
    if fields.get("expert_count", 0) != 0:
        raise fields.fail("mixture-of-experts models are not supported yet")
    if fields.get("attention.causal", True) is not True:
        raise fields.fail("attention.causal is false: only causal models can generate text")
    if fields.get("tensor_data_layout", "") not in ("", "reference", "Meta AI original pth"):
        raise fields.fail(f"tensor_data_layout {shown(fields.get('tensor_data_layout'))} is not supported")
    for key in sorted(set(fields.values) - _USED):
        if key.startswith(("attention.", "rope.", "expert_")) or key.endswith("_scale"):
            raise fields.fail(f"{key} is not supported, and leaving it out would change the answers")
        _log.warning("%s: ignored the unknown metadata key %s", fields.where, key)


def _per_layer_size(fields: Fields, key: str, limit: str, default: Any = None) -> int:
    """Some writers store one number per layer; they must all be equal."""
    value = fields.values.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise fields.fail(f"{key} differs between layers, which is not supported")
        fields = Fields({key: value[0]}, fields.where)
    return fields.size(key, limit) if default is None else fields.size(key, limit, default)


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if fields.get("attention.key_length", None) is None and hidden % heads:
        raise fields.fail(f"embedding_length {hidden} is not a multiple of attention.head_count {heads}")
    head_dim = fields.size("attention.key_length", "head_dim", hidden // heads)
    if fields.size("attention.value_length", "head_dim", head_dim) != head_dim:
        raise fields.fail("attention.key_length and attention.value_length differ, which is not supported")
    return head_dim


def _vocab_size(file: GGUFFile, fields: Fields) -> int:
    """The rows of the embedding: the metadata may be absent, and must agree if not."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise fields.fail("the tensor token_embd.weight is missing or not a matrix")
    rows = embedding.shape[0]
    if fields.get("vocab_size", rows) != rows:
        raise fields.fail(f"vocab_size is {shown(fields.get('vocab_size'))}, but token_embd.weight has {rows} rows")
    return Fields({"vocab_size": rows}, fields.where).size("vocab_size", "vocab_size")


def _sliding_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """A window here holds for every layer; the key that alternates layers (sliding_window_pattern) is refused above."""
    if fields.get("attention.sliding_window", 0) == 0:
        return ()
    return (fields.size("attention.sliding_window", "max_position"),) * layers


def _rope(file: GGUFFile, fields: Fields, family: str, head_dim: int) -> RopeConfig:
    dim = fields.size("rope.dimension_count", "head_dim", head_dim)
    if family == "llama" and dim != head_dim:
        # The writer's permutation of q and k rows assumes whole heads, so partly rotated ones cannot be undone.
        raise fields.fail(f"rope.dimension_count {dim} differs from the head size {head_dim}, which is not supported for llama")
    rope = RopeConfig(theta=fields.number("rope.freq_base", 1.0, 1e12, 10000.0), dim=dim)
    kind = fields.word("rope.scaling.type", "none")
    if kind == "none" and fields.get("rope.scale_linear", 1.0) not in (0, 1):
        rope = replace(rope, kind="linear", factor=fields.number("rope.scale_linear", 1e-3, 1e6))
    elif kind == "linear":
        rope = replace(rope, kind="linear", factor=fields.number("rope.scaling.factor", 1e-3, 1e6))
    elif kind == "yarn":
        rope = _yarn(fields, rope)
    elif kind != "none":
        raise fields.fail(f"the rope scaling type {shown(kind)} is not supported; supported are none, linear and yarn")
    if ROPE_FREQS not in file.tensors:
        return rope
    if rope.kind != "default":
        raise fields.fail(f"{ROPE_FREQS} next to rope scaling {rope.kind!r} is not supported")
    return replace(rope, freq_factors=_freq_factors(file, fields, dim))


def _yarn(fields: Fields, rope: RopeConfig) -> RopeConfig:
    factor = fields.number("rope.scaling.factor", 1e-3, 1e6)
    own = fields.number("rope.scaling.attn_factor", 0.0, 1e3, 1.0)  # multiplies YaRN's own 0.1 ln(factor) + 1
    attention = None if own == 1.0 else own * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return replace(
        rope,
        kind="yarn",
        factor=factor,
        original_max_position=fields.size("rope.scaling.original_context_length", "max_position"),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
        attention_factor=attention,
    )


def _freq_factors(file: GGUFFile, fields: Fields, dim: int) -> tuple[float, ...]:
    """Divisors of the rotary frequencies (Llama 3.1 and later), one per pair of dimensions."""
    shape = file.tensors[ROPE_FREQS].shape
    if shape != (dim // 2,):
        raise fields.fail(f"{ROPE_FREQS} has the shape {list(shape)}, expected [{dim // 2}]")
    factors = vector(GGUFSource(file), ROPE_FREQS)
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise fields.fail(f"{ROPE_FREQS} holds values that are not positive")
    return tuple(float(f) for f in factors)
