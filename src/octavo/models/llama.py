"""The Llama family (Touvron et al. 2023): Llama, SmolLM2, Mistral-like files; and the shape its relatives share.

A model is its forward pass and its name map, nothing else. Owner of the layers; weights are set by models/registry.py.
Not here: loading, batching, sampling.
"""

from __future__ import annotations

from octavo.layers.decoder import DecoderLayer, tap
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.model_config import ModelConfig
from octavo.ops.api import Array, ForwardBatch, Ops
from octavo.weight_spec import Part, WeightSpec, per_layer


class Llama:
    #: GGUF files of this architecture hold q and k rows permuted for interleaved rotary pairs.
    gguf_interleaved_qk = True

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        self.ops = ops
        self.embed = Embedding(ops)
        rope = ops.rope_table(config.rope, config.max_position)
        self.layers = [DecoderLayer(config, i, rope, ops) for i in range(config.num_layers)]
        self.norm = RMSNorm(ops, config.rms_norm_eps)
        self.lm_head = Linear(ops)

    def forward(self, batch: ForwardBatch) -> Array:
        """float32 [R, hidden]: the final hidden states of batch.logits_rows; writes the KV of every row."""
        x = self.embed(batch)
        tap(self.ops, batch, "embed", x)
        for layer in self.layers:
            x = layer(x, batch)
        x = self.norm(self.ops.take_rows(x, batch.logits_rows))
        tap(self.ops, batch, "norm", x)
        return x

    def logits(self, hidden: Array, num_generated: int) -> Array:
        """float32 [R, vocab] from rows of `forward`, the first `num_generated` of which are of kind GENERATED."""
        return self.lm_head(hidden, num_generated)

    @classmethod
    def weights(cls, c: ModelConfig) -> list[WeightSpec]:
        """Where every weight lies in a file. Attention is sharded by head, the MLP by its inner width."""
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        q_heads, kv_heads = (c.num_heads, c.num_kv_heads) if cls.gguf_interleaved_qk else (0, 0)
        hf = "model.layers.{i}"
        return [
            WeightSpec("embed.weight", "embedding", (Part("model.embed_tokens", "token_embd", c.vocab_size),), c.hidden_size, shard_axis=0),
            *per_layer(
                [
                    WeightSpec(
                        "layers.{i}.attn.qkv_proj.weight",
                        "linear",
                        (
                            Part(f"{hf}.self_attn.q_proj", "blk.{i}.attn_q", q, q_heads),
                            Part(f"{hf}.self_attn.k_proj", "blk.{i}.attn_k", kv, kv_heads),
                            Part(f"{hf}.self_attn.v_proj", "blk.{i}.attn_v", kv),
                        ),
                        c.hidden_size,
                        bias=c.qkv_bias,
                        shard_axis=0,
                    ),
                    WeightSpec(
                        "layers.{i}.attn.o_proj.weight",
                        "linear",
                        (Part(f"{hf}.self_attn.o_proj", "blk.{i}.attn_output", c.hidden_size),),
                        q,
                        bias=c.o_bias,
                        shard_axis=1,
                    ),
                    WeightSpec(
                        "layers.{i}.mlp.gate_up_proj.weight",
                        "linear",
                        (
                            Part(f"{hf}.mlp.gate_proj", "blk.{i}.ffn_gate", c.intermediate_size),
                            Part(f"{hf}.mlp.up_proj", "blk.{i}.ffn_up", c.intermediate_size),
                        ),
                        c.hidden_size,
                        bias=c.mlp_bias,
                        shard_axis=0,
                    ),
                    WeightSpec(
                        "layers.{i}.mlp.down_proj.weight",
                        "linear",
                        (Part(f"{hf}.mlp.down_proj", "blk.{i}.ffn_down", c.hidden_size),),
                        c.intermediate_size,
                        bias=c.mlp_bias,
                        shard_axis=1,
                    ),
                    WeightSpec(
                        "layers.{i}.input_norm.weight",
                        "vector",
                        (Part(f"{hf}.input_layernorm", "blk.{i}.attn_norm", c.hidden_size),),
                    ),
                    WeightSpec(
                        "layers.{i}.post_norm.weight",
                        "vector",
                        (Part(f"{hf}.post_attention_layernorm", "blk.{i}.ffn_norm", c.hidden_size),),
                    ),
                ],
                c.num_layers,
            ),
            WeightSpec("norm.weight", "vector", (Part("model.norm", "output_norm", c.hidden_size),)),
            WeightSpec(
                "lm_head.weight",
                "linear",
                (Part("lm_head", "output", c.vocab_size),),
                c.hidden_size,
                shard_axis=0,
                tied_to="embed.weight" if c.tie_word_embeddings else None,
            ),
        ]
