"""LocalExecutor: the model in this process, behind the engine's Executor protocol.

Owner of everything that computes: ops, weights, KV pool. Built once per engine by llm.py.
Not here: other processes or machines (distributed/, later).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from octavo.config import EngineConfig
from octavo.engine.scheduler_output import ExecutorInfo, KVGroup, SchedulerOutput, StepResult
from octavo.errors import ConfigError
from octavo.loading.source import ModelFiles
from octavo.loading.weights import load_weights
from octavo.models.registry import build_model, model_class
from octavo.ops.api import Taps
from octavo.ops.needs import op_needs
from octavo.ops.registry import make_ops
from octavo.worker.kv_cache import kv_specs, max_model_len, served_windows
from octavo.worker.model_runner import ModelRunner

_log = logging.getLogger("octavo")


class LocalExecutor:
    """Loads the model and runs steps of it. Raises ModelLoadError or ConfigError while loading."""

    def __init__(self, files: ModelFiles, config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> None:
        started = perf_counter()
        model_len = max_model_len(files.config, config)
        model_config = replace(files.config, max_position=model_len, sliding_windows=served_windows(files.config, model_len))
        self.model_config = files.config
        self.ops = make_ops(config, op_needs(model_config, config))
        specs = model_class(model_config.architecture).weights(model_config)
        kv = kv_specs(model_config, config, self.ops)
        groups = tuple(KVGroup(s.num_blocks, s.block_size, window) for s, window in zip(kv, model_config.kv_windows, strict=True))
        # No sequence is longer than the pool, so rotary tables need not be: a file may claim a context of millions.
        tables = replace(model_config, max_position=min(model_len, *(group.max_tokens for group in groups)))
        threads = int(self.ops.describe().get("threads", 1))
        try:
            weights = load_weights(files, specs, self.ops, progress, quantize=config.quantize, threads=threads)
            model = build_model(tables, self.ops, weights)
            self.runner: ModelRunner | None = ModelRunner(model, self.ops, kv, model_config.vocab_size, config.replay)
        except MemoryError as error:
            raise ConfigError(f"not enough memory for weights and KV pool of {files.name}: lower kv_cache_memory ({error})") from None
        self._info = ExecutorInfo(
            kv_groups=groups,
            vocab_size=model_config.vocab_size,
            max_model_len=model_len,
            block_bytes=tuple(self.ops.kv_block_bytes(spec) for spec in kv),
        )
        self.load_seconds = perf_counter() - started
        blocks = " + ".join(str(group.num_blocks) for group in groups)
        _log.info("loaded %s in %.2f s: backend %s, %s KV blocks", files.name, self.load_seconds, self.ops.name, blocks)

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def execute(self, output: SchedulerOutput, taps: Taps | None = None) -> StepResult:
        """`taps`: what a reader wants to see of this step (ops/api.py)."""
        assert self.runner is not None, "the executor is closed"
        return self.runner.execute(output, taps)

    def close(self) -> None:
        """Let go of weights and KV pool, whoever still holds this object; closing twice is nothing."""
        self.runner = None
