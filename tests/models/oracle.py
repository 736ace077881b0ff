"""The real SmolLM2 in transformers, float32, on the weights that the `gguf` package dequantises: nothing of Octavo's in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i + j of a head (interleaved pairs) goes back to row i + j * half."""
    out = np.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            for j in range(2):
                out[head * size + i + j * (size // 2)] = rows[head * size + 2 * i + j]
    return out


def smollm2_in_transformers(path: Path):
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    state = {}
    for tensor in GGUFReader(str(path)).tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name.startswith("blk."):
            _, layer, name, _ = tensor.name.split(".")
            if name in ("attn_q", "attn_k"):
                values = _half_split(values, 9 if name == "attn_q" else 3)
            state[f"model.layers.{layer}.{LAYER_NAMES[name]}.weight"] = torch.from_numpy(values)
        else:
            key = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[tensor.name]
            state[key] = torch.from_numpy(values)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    assert float(model.config.rope_parameters["rope_theta"]) == 100000.0
    return model.eval()


def logits_of(model, tokens) -> np.ndarray:
    """float32 [T, V]."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].float().numpy()
