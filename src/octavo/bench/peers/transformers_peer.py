"""transformers for runner.py: its own model and cache, called in a plain loop without the wrapping of generate(), which is slower.

Options: dtype (default: bfloat16 where the processor computes with it, else float32, which is then several times faster),
attention (sdpa, eager). Not here: the protocol (runner.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers


def computes_with_bfloat16() -> bool:
    """Whether the processor has instructions for it."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(file.read().split()))


class Engine:
    def __init__(self, model: str, limits: dict[str, int], options: dict[str, Any]) -> None:
        unknown = set(options) - {"dtype", "attention"}
        if unknown:
            raise ValueError(f"no such options: {', '.join(sorted(unknown))}")
        torch.set_num_threads(limits["threads"])
        dtype = str(options.get("dtype", "bfloat16" if computes_with_bfloat16() else "float32"))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation=options.get("attention", "sdpa"), local_files_only=True
        ).eval()
        self.vocab_size = self.model.config.vocab_size
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__, "weights": f"bfloat16, computed in {dtype}"}

    def prepare(self, batch: int, prompt_tokens: int, tokens: int) -> None:
        pass

    def generate(self, prompts: list[list[int]], tokens: int) -> Iterator[list[tuple[int, int]]]:
        cache, ids = transformers.DynamicCache(config=self.model.config), torch.tensor(prompts)
        for _ in range(tokens):
            with torch.inference_mode():
                output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                ids = output.logits[:, -1].argmax(-1, keepdim=True)
            yield list(enumerate(ids[:, 0].tolist()))
