"""vLLM (its CPU build) for runner.py: its engine in this process, stepped by hand; its prefix cache is off.

Options: arguments of vllm.EngineArgs; dtype's default is bfloat16 where the processor computes with it, else float32.
Not here: the protocol (runner.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

# before vllm is imported: one process, and no threads but those asked for
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_DO_NOT_TRACK", "1")

import torch
import vllm


def computes_with_bfloat16() -> bool:
    """Whether the processor has instructions for it."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(file.read().split()))


class Engine:
    def __init__(self, model: str, limits: dict[str, int], options: dict[str, Any]) -> None:
        # its own choice leaves hyperthreads out, and sets the number of threads by the cores
        cores = sorted(os.sched_getaffinity(0))[: limits["threads"]]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        settings = {
            "dtype": "bfloat16" if computes_with_bfloat16() else "float32",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": limits["max_len"],
            "max_num_seqs": limits["max_batch"],
            **options,
        }
        self.engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(model=model, **settings))
        self.vocab_size = self.engine.model_config.get_vocab_size()
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__, "weights": f"bfloat16, computed in {settings['dtype']}"}
        self.requests = 0

    def prepare(self, batch: int, prompt_tokens: int, tokens: int) -> None:
        pass

    def generate(self, prompts: list[list[int]], tokens: int) -> Iterator[list[tuple[int, int]]]:
        params = vllm.SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )
        numbers = {}
        for number, prompt in enumerate(prompts):
            self.requests += 1
            numbers[str(self.requests)] = number
            self.engine.add_request(str(self.requests), {"prompt_token_ids": prompt}, params)
        while self.engine.has_unfinished_requests():
            yield [(numbers[output.request_id], token) for output in self.engine.step() for token in output.outputs[0].token_ids]
