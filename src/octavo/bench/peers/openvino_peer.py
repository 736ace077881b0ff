"""OpenVINO GenAI for runner.py: its continuous batching pipeline, stepped by hand; its prefix cache is off.

A GGUF file (Q4_0, Q4_1, Q8_0, F16) or a folder made by optimum. Options: any property of the CPU device, and
max_num_batched_tokens. Not here: the protocol (runner.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai


class Engine:
    def __init__(self, model: str, limits: dict[str, int], options: dict[str, Any]) -> None:
        options = dict(options)
        scheduler = openvino_genai.SchedulerConfig()
        # its blocks hold 32 tokens
        scheduler.num_kv_blocks = limits["max_batch"] + -(-limits["kv_tokens"] // 32)
        scheduler.max_num_seqs = max(limits["max_batch"], 2)
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = options.pop("max_num_batched_tokens", 512)
        properties = {"INFERENCE_NUM_THREADS": limits["threads"], **options}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.vocab_size = len(self.pipeline.get_tokenizer().get_vocab())
        self.versions = {
            "openvino-genai": openvino_genai.__version__,
            "openvino": openvino.__version__,
            "weights": "as the file has them",
        }
        self.requests = 0

    def prepare(self, batch: int, prompt_tokens: int, tokens: int) -> None:
        pass

    def generate(self, prompts: list[list[int]], tokens: int) -> Iterator[list[tuple[int, int]]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        handles = []
        for prompt in prompts:
            self.requests += 1
            handles.append(self.pipeline.add_request(self.requests, openvino.Tensor(np.array([prompt], np.int64)), config))
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            yield [
                (request, token)
                for request, handle in enumerate(handles)
                if handle.can_read()
                for output in handle.read().values()
                for token in output.generated_ids
            ]
