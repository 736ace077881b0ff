"""The shapes that `octavo bench make-model` can write: hyperparameters and the table of tensors, nothing random.

Plain data and pure functions; names as in GGUF files and, for safetensors, as in Hugging Face's.
Not here: values and files (make_model.py), vocabularies (made_vocabulary.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    #: "llama" or "qwen2", in GGUF and in Hugging Face's configuration alike.
    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    rope_theta: float
    rms_eps: float
    qkv_bias: bool
    tied: bool
    #: What tokenizer.ggml.pre says where the vocabulary is a generated one.
    pre: str

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("qwen2.5-7b", "qwen2", 28, 3584, 18944, 28, 4, 152064, 32768, 1e6, 1e-6, True, False, "qwen2"),
        ModelShape("qwen2.5-0.5b", "qwen2", 24, 896, 4864, 14, 2, 151936, 32768, 1e6, 1e-6, True, True, "qwen2"),
        ModelShape("smollm2-135m", "llama", 30, 576, 1536, 9, 3, 49152, 8192, 1e5, 1e-5, False, True, "smollm"),
    )
}


@dataclass(frozen=True, slots=True)
class TensorShape:
    """`spread`: the standard deviation of a matrix's or bias's values; 0 for the weights of a norm, which lie around 1."""

    gguf: str
    hf: str
    shape: tuple[int, ...]
    spread: float

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def tensors(s: ModelShape) -> list[TensorShape]:
    """Every tensor in the order of the file.

    Spreads keep each sublayer's output near 1 / sqrt(2 layers), so that the residual stream neither grows with depth nor
    vanishes, and give logits a standard deviation of about 3: finite, and neither flat nor of one token.
    """
    kv, inner = s.kv_heads * s.head_dim, 1 / math.sqrt(2 * s.layers)
    logits = 3 / math.sqrt(s.hidden)

    def matrix(gguf: str, hf: str, rows: int, cols: int, spread: float = 0.0) -> TensorShape:
        return TensorShape(f"{gguf}.weight", f"{hf}.weight", (rows, cols), spread or 1 / math.sqrt(cols))

    def norm(gguf: str, hf: str) -> TensorShape:
        return TensorShape(f"{gguf}.weight", f"{hf}.weight", (s.hidden,), 0.0)

    def layer(i: int) -> list[TensorShape]:
        g, h = f"blk.{i}", f"model.layers.{i}"
        projections = (("q", s.hidden), ("k", kv), ("v", kv))
        biases = [TensorShape(f"{g}.attn_{n}.bias", f"{h}.self_attn.{n}_proj.bias", (rows,), 0.3) for n, rows in projections]
        return [
            norm(f"{g}.attn_norm", f"{h}.input_layernorm"),
            *(matrix(f"{g}.attn_{n}", f"{h}.self_attn.{n}_proj", rows, s.hidden) for n, rows in projections),
            *(biases if s.qkv_bias else []),
            matrix(f"{g}.attn_output", f"{h}.self_attn.o_proj", s.hidden, s.hidden, inner / math.sqrt(s.hidden)),
            norm(f"{g}.ffn_norm", f"{h}.post_attention_layernorm"),
            matrix(f"{g}.ffn_gate", f"{h}.mlp.gate_proj", s.ffn, s.hidden),
            matrix(f"{g}.ffn_up", f"{h}.mlp.up_proj", s.ffn, s.hidden),
            matrix(f"{g}.ffn_down", f"{h}.mlp.down_proj", s.hidden, s.ffn, 2 * inner / math.sqrt(s.ffn)),
        ]

    return [
        matrix("token_embd", "model.embed_tokens", s.vocab, s.hidden, logits if s.tied else 1.0),
        *(tensor for i in range(s.layers) for tensor in layer(i)),
        norm("output_norm", "model.norm"),
        *([] if s.tied else [matrix("output", "lm_head", s.vocab, s.hidden, logits)]),
    ]


def gguf_hyperparameters(s: ModelShape) -> dict[str, Any]:
    """Metadata under the architecture's prefix (gguf-py/gguf/constants.py of llama.cpp names the keys)."""
    found = {
        "context_length": s.context, "embedding_length": s.hidden, "block_count": s.layers, "feed_forward_length": s.ffn,
        "attention.head_count": s.heads, "attention.head_count_kv": s.kv_heads, "rope.freq_base": s.rope_theta,
        "attention.layer_norm_rms_epsilon": s.rms_eps, "vocab_size": s.vocab, "rope.dimension_count": s.head_dim,
    }  # fmt: skip
    return {f"{s.architecture}.{key}": value for key, value in found.items()}


def hf_config(s: ModelShape) -> dict[str, Any]:
    """config.json."""
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    return {
        "architectures": [names[s.architecture]], "model_type": s.architecture, "dtype": "bfloat16", "torch_dtype": "bfloat16",
        "vocab_size": s.vocab, "hidden_size": s.hidden, "intermediate_size": s.ffn, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "max_position_embeddings": s.context,
        "rms_norm_eps": s.rms_eps, "rope_theta": s.rope_theta, "tie_word_embeddings": s.tied, "hidden_act": "silu",
    }  # fmt: skip
