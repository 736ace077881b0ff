"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's shape with a bias on q, k and v.

The bias comes with ModelConfig.qkv_bias, which loading sets for this architecture. GGUF files of this architecture keep
q and k rows in Hugging Face's order.
"""

from __future__ import annotations

from octavo.models.llama import Llama


class Qwen2(Llama):
    gguf_interleaved_qk = False
