"""config.json of a Hugging Face checkpoint -> ModelConfig.

Follows transformers' LlamaConfig and Qwen2Config and its RoPE parameters, old style (`rope_scaling`) and new
(`rope_parameters`). What is not understood is refused, never skipped. Pure functions.
Not here: weights, generation defaults and end tokens (source.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from octavo.errors import shown
from octavo.loading.fields import MAX_SIZES, Fields, check_model_config
from octavo.loading.json_file import read_json_object
from octavo.model_config import ModelConfig, RopeConfig

#: model_type -> the class that must be named in `architectures`.
KNOWN: Mapping[str, str] = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

_DTYPES = ("float32", "float16", "bfloat16")


def read_hf_config(path: Path) -> ModelConfig:
    return parse_hf_config(read_json_object(path), str(path))


def parse_hf_config(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Raises ModelLoadError, naming `where` and the field."""
    fields = Fields(values, where)
    family = _family(fields)
    if fields.get("quantization_config", None) or fields.get("compression_config", None):
        method = fields.values.get("quantization_config") or {}
        name = method.get("quant_method", "unknown") if isinstance(method, Mapping) else "unknown"
        raise fields.fail(f"weights quantised by {shown(name)} are not supported: use the original model or a GGUF file")
    if (act := fields.word("hidden_act", "silu")) not in ("silu", "swish"):
        raise fields.fail(f"hidden_act {shown(act)} is not supported, only silu")
    hidden = fields.size("hidden_size", "hidden_size")
    heads = fields.size("num_attention_heads", "num_heads")
    head_dim = fields.get("head_dim", None)
    if head_dim is None and hidden % heads:
        raise fields.fail(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is missing")
    head_dim = fields.size("head_dim", "head_dim", hidden // heads)
    layers = fields.size("num_hidden_layers", "num_layers")
    max_position = fields.size("max_position_embeddings", "max_position", 2048 if family == "llama" else 32768)
    rope = _rope(fields, head_dim, max_position)
    llama_bias = family == "llama" and fields.flag("attention_bias", False)
    config = ModelConfig(
        architecture=family,
        vocab_size=fields.size("vocab_size", "vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size", "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", "num_kv_heads", heads),
        head_dim=head_dim,
        max_position=_stretched(fields, rope, max_position),
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or llama_bias,
        o_bias=llama_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias", False),
        sliding_windows=_sliding_windows(fields, layers) if family == "qwen2" else (),
        dtype=_dtype(fields),
    )
    return check_model_config(config, where)


def _stretched(fields: Fields, rope: RopeConfig, max_position: int) -> int:
    """YaRN stretches the context by definition, and many files with it keep the length from before."""
    if rope.kind != "yarn":
        return max_position
    stretched = max(max_position, int(rope.factor * rope.original_max_position))
    if stretched > MAX_SIZES["max_position"]:
        raise fields.fail(
            f"a context of {rope.factor:g} times {rope.original_max_position} positions is more than {MAX_SIZES['max_position']}"
        )
    return stretched


def _family(fields: Fields) -> str:
    family = fields.word("model_type")
    if family not in KNOWN:
        raise fields.fail(f"the architecture {shown(family)} is not supported; supported are {', '.join(sorted(KNOWN))}")
    classes = fields.get("architectures", [KNOWN[family]])
    if not isinstance(classes, list) or KNOWN[family] not in classes:
        raise fields.fail(f"architectures is {shown(classes)}, and only {KNOWN[family]} can generate text here")
    return family


def _dtype(fields: Fields) -> str:
    name = fields.get("dtype", fields.get("torch_dtype", "float32"))
    if name in (None, "auto"):
        return "float32"
    if name not in _DTYPES:
        raise fields.fail(f"dtype {shown(name)} is not supported; supported are {', '.join(_DTYPES)}")
    return str(name)


def _rope(fields: Fields, head_dim: int, max_position: int) -> RopeConfig:
    """rope_scaling wins over rope_parameters, and their own rope_theta over the one beside them, as in transformers."""
    params = fields.get("rope_scaling", None) or fields.get("rope_parameters", None) or {}
    if not isinstance(params, Mapping):
        raise fields.fail(f"rope_parameters must be an object, got {shown(params)}")
    if any(isinstance(value, Mapping) for value in params.values()):
        raise fields.fail("rope_parameters that differ between kinds of layers are not supported")
    inner = Fields({**{k: fields.values.get(k) for k in ("rope_theta", "partial_rotary_factor")}, **params}, fields.where)
    kind = inner.word("rope_type", inner.get("type", "default"))
    partial = inner.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    common: dict[str, Any] = {"theta": inner.number("rope_theta", 1.0, 1e12, 10000.0), "dim": int(head_dim * partial)}
    if kind == "default":
        return RopeConfig(**common)
    if kind == "linear":
        return RopeConfig(**common, kind="linear", factor=_factor(inner))
    original = _original_max_position(fields, inner, max_position)
    if kind == "llama3":
        low, high = inner.number("low_freq_factor", 1e-3, 1e6), inner.number("high_freq_factor", 1e-3, 1e6)
        if high <= low:
            raise inner.fail(f"high_freq_factor {high:g} must be larger than low_freq_factor {low:g}")
        return RopeConfig(
            **common, kind="llama3", factor=_factor(inner), original_max_position=original, low_freq_factor=low, high_freq_factor=high
        )
    if kind == "yarn":
        return _yarn(inner, common, original, max_position)
    raise fields.fail(f"the rope type {shown(kind)} is not supported; supported are default, linear, llama3 and yarn")


def _factor(inner: Fields, default: float | None = None) -> float:
    return inner.number("factor", 1e-3, 1e6, *(() if default is None else (default,)))


def _original_max_position(fields: Fields, inner: Fields, max_position: int) -> int:
    if fields.get("original_max_position_embeddings", None) is not None:
        return fields.size("original_max_position_embeddings", "max_position")
    return inner.size("original_max_position_embeddings", "max_position", max_position)


def _yarn(inner: Fields, common: dict[str, Any], original: int, max_position: int) -> RopeConfig:
    attention = None if inner.get("attention_factor", None) is None else inner.number("attention_factor", 0.0, 1e3)
    # 0 counts as absent for these four, as in transformers
    beta_fast, beta_slow = inner.number("beta_fast", 0.0, 1e6, 32.0) or 32.0, inner.number("beta_slow", 0.0, 1e6, 1.0) or 1.0
    if beta_fast < beta_slow:
        raise inner.fail(f"beta_fast {beta_fast:g} must not be below beta_slow {beta_slow:g}")
    kind: Literal["yarn"] = "yarn"
    return RopeConfig(
        **common,
        kind=kind,
        factor=_factor(inner, max_position / original),
        original_max_position=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention,
        mscale=inner.number("mscale", 0.0, 1e3, 0.0),
        mscale_all_dim=inner.number("mscale_all_dim", 0.0, 1e3, 0.0),
        truncate=inner.flag("truncate", True),
    )


def _sliding_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Qwen2: layers from max_window_layers on see a window, if use_sliding_window; a list in layer_types overrules."""
    window = None
    if fields.flag("use_sliding_window", False) and fields.get("sliding_window", 4096) is not None:
        window = fields.size("sliding_window", "max_position", 4096)
    first = fields.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise fields.fail(f"max_window_layers must be an integer of at least 0, got {shown(first)}")
    kinds = fields.get("layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.fail(f"layer_types must list {layers} layers, got {shown(kinds)}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.fail(f"the layer type {shown(kind)} is not supported")
        if kind == "sliding_attention" and window is None:
            raise fields.fail("layer_types asks for sliding_attention, but sliding_window is off")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()
