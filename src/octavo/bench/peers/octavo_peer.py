"""Octavo for runner.py: the public API. Times include what a caller always pays here, the detokenizer among it.

Options: fields of EngineConfig. Not here: the protocol (runner.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import octavo
from octavo import LLM, SamplingParams


class Engine:
    def __init__(self, model: str, limits: dict[str, int], options: dict[str, Any]) -> None:
        settings = {"threads": limits["threads"], "enable_prefix_caching": False, **options}
        block = settings.get("block_size", 16)
        if "kv_cache_memory" not in settings:
            settings.setdefault("num_kv_blocks", limits["max_batch"] + -(-limits["kv_tokens"] // block))
        for name in ("max_num_seqs", "max_decode_batch_size"):
            settings[name] = max(limits["max_batch"], settings.get(name, 0))
        self.llm = LLM(model, **settings)
        self.vocab_size = self.llm.executor.info.vocab_size
        self.versions = {"octavo": octavo.__version__, "weights": "as the file has them"}

    def prepare(self, batch: int, prompt_tokens: int, tokens: int) -> None:
        pass

    def generate(self, prompts: list[list[int]], tokens: int) -> Iterator[list[tuple[int, int]]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for deltas in self.llm.stream_batch(prompts, params):
            yield [(request, token) for request, delta in deltas for token in delta.token_ids]
