"""llama.cpp for runner.py, through the C API that llama-cpp-python binds: no Python between a step and the next but greedy choice.

Each shape of work gets a context of its own, made before the clock starts, with exactly the cells it needs.
Options: n_batch, n_ubatch, flash_attn (-1: as llama.cpp chooses, 0, 1). Not here: the protocol (runner.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import llama_cpp
import numpy as np


class Engine:
    def __init__(self, model: str, limits: dict[str, int], options: dict[str, Any]) -> None:
        unknown = set(options) - {"n_batch", "n_ubatch", "flash_attn"}
        if unknown:
            raise ValueError(f"no such options: {', '.join(sorted(unknown))}")
        self.threads, self.options = limits["threads"], options
        self.context: Any = None
        self.batch: Any = None
        llama_cpp.llama_backend_init()
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, None)
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise ValueError("llama.cpp cannot load this file (it needs a GGUF file)")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        features = llama_cpp.llama_print_system_info().decode()
        self.versions = {"llama-cpp-python": llama_cpp.__version__, "weights": "as the file has them", "built for": features}

    def prepare(self, batch: int, prompt_tokens: int, tokens: int) -> None:
        if self.context is not None:
            llama_cpp.llama_batch_free(self.batch)
            llama_cpp.llama_free(self.context)
        params = llama_cpp.llama_context_default_params()
        each = -(-(prompt_tokens + tokens) // 256) * 256  # llama.cpp rounds so itself
        params.n_ctx, params.n_seq_max = each * batch, batch
        params.n_threads = params.n_threads_batch = self.threads
        params.n_batch = self.options.get("n_batch", max(2048, batch))
        params.n_ubatch = self.options.get("n_ubatch", params.n_ubatch)
        if "flash_attn" in self.options:
            params.flash_attn_type = self.options["flash_attn"]
        params.kv_unified = False  # each sequence in its own stream: attention does not look at the others' cells
        self.n_batch = params.n_batch
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise ValueError("llama.cpp cannot make a context of this size")
        self.batch = llama_cpp.llama_batch_init(self.n_batch, 0, 1)

    def generate(self, prompts: list[list[int]], tokens: int) -> Iterator[list[tuple[int, int]]]:
        length = len(prompts[0])
        rows = [(token, i, request, i == length - 1) for request, prompt in enumerate(prompts) for i, token in enumerate(prompt)]
        last: dict[int, int] = {}
        for start in range(0, len(rows), self.n_batch):
            found = self._decode(rows[start : start + self.n_batch])
            last.update(found)
            if found:
                yield list(found.items())
        for position in range(length, length + tokens - 1):
            last = self._decode([(last[request], position, request, True) for request in range(len(prompts))])
            yield list(last.items())

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Request -> most probable next token, for the rows that ask for it."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, request, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = request
        if status := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode: {status}")
        return {request: self._argmax(i) for i, (_, _, request, wanted) in enumerate(rows) if wanted}

    def _argmax(self, row: int) -> int:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, row), (self.vocab_size,))
        return int(logits.argmax())
