"""Writes tiny random models, every parameter random, as safetensors or GGUF, and gives the same model in transformers.

    tiny = write_tiny(tmp_path / "m", family="qwen2", fmt="gguf", seed=1, quant="Q4_0")
    LLM(str(tiny.path)); hf_model(tiny)          # float32, the same (dequantised) weights

The same seed and sizes give the same weights in both formats. `gguf` and `transformers` are oracles here, so nothing of
Octavo is used. Overrides: sizes and flags below by name, and anything else goes into config.json as it is.
Tokenizer: one token per byte and a few special ones (write_byte_tokenizer), with a ChatML template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unused|>")
#: 256 bytes, one merge ("h" + "e", since a GGUF array cannot be empty), then SPECIAL_TOKENS.
ENDOFTEXT, IM_START, IM_END, UNUSED = range(257, 261)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
#: What the converter writes as float32 whatever the file's type: vectors.
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip

Weights = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class TinyModel:
    #: What resolve_source takes: the folder (safetensors) or the .gguf file.
    path: Path
    family: str
    #: Arguments of LlamaConfig or Qwen2Config.
    hf_config_kwargs: dict[str, Any]
    #: Hugging Face name -> float32 values as the file holds them, that is after rounding or quantisation.
    state_dict: Weights = field(repr=False)


def write_tiny(
    path: Path,
    family: str = "llama",
    fmt: str = "safetensors",
    seed: int = 0,
    *,
    dtype: str = "float32",
    quant: str | Mapping[str, str] = "F32",
    shards: int = 1,
    tokenizer: bool = True,
    generation_config: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> TinyModel:
    """Writes a model into the folder `path` (made if needed).

    dtype: of a safetensors file, "float32", "float16" or "bfloat16". quant: of a GGUF file's matrices, any type Octavo
    loads, or a mapping of GGUF name -> type with a default under "". shards: split safetensors into that many files.
    overrides: settings of the Hugging Face config, e.g. hidden_size=128, tie_word_embeddings=True, attention_bias=True,
    rope_parameters={...}, use_sliding_window=True, sliding_window=8, max_window_layers=1.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {**_DEFAULTS, **overrides}
    if family == "qwen2":
        config["head_dim"] = overrides.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    weights = random_weights(family, config, seed)
    if fmt == "safetensors":
        weights = _write_safetensors(path, family, config, weights, dtype, shards, generation_config)
        if tokenizer:
            write_byte_tokenizer(path)
        return TinyModel(path, family, config, weights)
    if fmt == "gguf":
        weights = _write_gguf(path / "model.gguf", family, config, weights, quant, tokenizer, seed)
        return TinyModel(path / "model.gguf", family, config, weights)
    raise ValueError(f"fmt must be safetensors or gguf, got {fmt!r}")


def hf_model(tiny: TinyModel) -> Any:
    """The model in transformers, float32, eval mode, eager attention; fails unless every weight is set."""
    import torch
    import transformers

    config_class = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[tiny.family]
    model_class = {"llama": transformers.LlamaForCausalLM, "qwen2": transformers.Qwen2ForCausalLM}[tiny.family]
    kwargs = json.loads(json.dumps(tiny.hf_config_kwargs))  # transformers edits the dictionaries it is given
    model = model_class(config_class(**kwargs, attn_implementation="eager"))
    state = {name: torch.from_numpy(values.copy()) for name, values in tiny.state_dict.items()}
    if tiny.hf_config_kwargs["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.float().eval()


def random_weights(family: str, config: Mapping[str, Any], seed: int) -> Weights:
    """Every parameter random: matrices of a size that keeps activations near 1, norms around 1, biases around 0."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    qkv_bias = family == "qwen2" or bool(config.get("attention_bias"))
    o_bias, mlp_bias = family == "llama" and bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    out: Weights = {}

    def norm(name: str) -> None:
        out[f"{name}.weight"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)

    def matrix(name: str, rows: int, cols: int, bias: bool = False, scale: float = 1.0) -> None:
        out[f"{name}.weight"] = (rng.standard_normal((rows, cols)) * scale / math.sqrt(cols)).astype(np.float32)
        if bias:
            out[f"{name}.bias"] = (rng.standard_normal(rows) * 0.5).astype(np.float32)

    matrix("model.embed_tokens", config["vocab_size"], hidden, scale=math.sqrt(hidden))
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm")
        matrix(f"{layer}.self_attn.q_proj", q, hidden, qkv_bias, scale=2.0)  # sharper than uniform attention
        matrix(f"{layer}.self_attn.k_proj", kv, hidden, qkv_bias, scale=2.0)
        matrix(f"{layer}.self_attn.v_proj", kv, hidden, qkv_bias)
        matrix(f"{layer}.self_attn.o_proj", hidden, q, o_bias)
        norm(f"{layer}.post_attention_layernorm")
        matrix(f"{layer}.mlp.gate_proj", inner, hidden, mlp_bias)
        matrix(f"{layer}.mlp.up_proj", inner, hidden, mlp_bias)
        matrix(f"{layer}.mlp.down_proj", hidden, inner, mlp_bias)
    norm("model.norm")
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], hidden)
    return out


# -- safetensors ---------------------------------------------------------------------------------------------------
def _write_safetensors(
    path: Path, family: str, config: Mapping[str, Any], weights: Weights, dtype: str, shards: int, generation: Mapping[str, Any] | None
) -> Weights:
    import ml_dtypes
    from safetensors.numpy import save_file

    stored = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    tensors = {name: values.astype(stored) for name, values in weights.items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    else:
        names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        of = {tensor: names[i * shards // len(tensors)] for i, tensor in enumerate(tensors)}
        for name in names:
            save_file({t: v for t, v in tensors.items() if of[t] == name}, path / name)
        index = {"metadata": {"total_size": sum(v.nbytes for v in tensors.values())}, "weight_map": of}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    ids = {"bos_token_id": None, "eos_token_id": IM_END}
    write_json(path / "config.json", {"model_type": family, "architectures": [names[family]], "dtype": dtype, **ids, **config})
    write_json(path / "generation_config.json", {**ids, **(generation or {})})
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


# -- GGUF ----------------------------------------------------------------------------------------------------------
def gguf_name(hf_name: str) -> str:
    """ "blk.0.attn_q.weight" of "model.layers.0.self_attn.q_proj.weight"."""
    stem, kind = hf_name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[rest]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def permute_for_gguf(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """As llama.cpp's converter stores q and k (weights and biases) of the llama architecture: halves become pairs."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _write_gguf(
    path: Path, family: str, config: Mapping[str, Any], weights: Weights, quant: str | Mapping[str, str], tokenizer: bool, seed: int
) -> Weights:
    import gguf

    writer = gguf.GGUFWriter(path, family)
    _gguf_hyperparameters(writer, config)
    if tokenizer:
        _gguf_tokenizer(writer, config["vocab_size"])
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_freq_factors(rope, config["head_dim"]))
    rng = np.random.default_rng(seed + 1)
    stored: Weights = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in weights.items():
        target = gguf_name(name)
        wanted = quant if isinstance(quant, str) else quant.get(target, quant.get("", "F32"))
        kind = gguf.GGMLQuantizationType[wanted if values.ndim == 2 else "F32"]
        raw = _quantize(values, kind, rng)
        stored[name] = gguf.dequantize(raw, kind).reshape(values.shape)
        if family == "llama" and name.split(".")[-2] in heads:
            raw = permute_for_gguf(raw, heads[name.split(".")[-2]])
        writer.add_tensor(target, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _quantize(values: npt.NDArray[np.float32], kind: Any, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Blocks of the values, or, for K-quants, which the gguf package only reads, random blocks of about the same size."""
    import gguf

    if kind.name not in ("Q4_K", "Q5_K", "Q6_K"):
        return gguf.quantize(values, kind)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    if values.shape[1] % block:
        raise ValueError(f"{kind.name} needs rows of a multiple of {block} values, got {values.shape[1]}")
    blocks = rng.integers(0, 256, (values.size // block, nbytes), dtype=np.uint8)
    spread = np.float32(1 / math.sqrt(values.shape[1]))
    # d, and dmin where there is one: so that the values spread around zero as random weights do
    factors = {"Q4_K": (1 / 200, 1 / 32), "Q5_K": (1 / 400, 1 / 32), "Q6_K": (1 / 1500,)}[kind.name]
    halves = np.array([spread * f for f in factors], np.float16).view(np.uint8)
    at = nbytes - 2 if kind.name == "Q6_K" else 0
    blocks[:, at : at + halves.size] = halves
    return blocks.reshape(values.shape[0], -1)


def _gguf_hyperparameters(writer: Any, config: Mapping[str, Any]) -> None:
    import gguf

    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("use_sliding_window"):
        if config.get("max_window_layers", 28) != 0:
            raise ValueError("a GGUF file can only say that every layer has the window: max_window_layers=0")
        writer.add_sliding_window(config["sliding_window"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def llama3_freq_factors(rope: Mapping[str, Any], head_dim: int) -> npt.NDArray[np.float32]:
    """What the converter stores as rope_freqs.weight: original frequency over scaled frequency, per pair."""
    factors = []
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for pair in range(head_dim // 2):
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-2 * pair / head_dim) / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


# -- tokenizer -----------------------------------------------------------------------------------------------------
def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2): printable ones for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_vocabulary() -> list[str]:
    return [*byte_alphabet(), "he", *SPECIAL_TOKENS]


def write_byte_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE with byte b as id b, one merge, and SPECIAL_TOKENS."""
    vocabulary = byte_vocabulary()
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": 257 + i, "content": token, **plain} for i, token in enumerate(SPECIAL_TOKENS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(vocabulary[:257])}, "merges": [["h", "e"]],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    write_json(folder / "tokenizer.json", tokenizer)
    config = {
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added},
        "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML,
        "add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    write_json(folder / "tokenizer_config.json", config)


def _gguf_tokenizer(writer: Any, vocab_size: int) -> None:
    """The same tokenizer as metadata; ids beyond it are unused tokens, as the converter pads."""
    import gguf

    tokens = byte_vocabulary()
    kinds = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    if vocab_size < len(tokens):
        raise ValueError(f"vocab_size must be at least {len(tokens)} for the byte tokenizer; or pass tokenizer=False")
    padding = range(len(tokens), vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in padding])
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(IM_END)
    writer.add_pad_token_id(ENDOFTEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
