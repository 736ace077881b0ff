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
from octavo.loading.source import ModelFiles
from octavo.loading.weights import load_weights
from octavo.model_config import ModelConfig
from octavo.models.registry import build_model, model_class
from octavo.ops.api import OpNeeds
from octavo.ops.registry import make_ops
from octavo.worker.kv_cache import kv_dtype, kv_spec, max_model_len
from octavo.worker.model_runner import ModelRunner

_log = logging.getLogger("octavo")


def op_needs(model: ModelConfig, config: EngineConfig) -> OpNeeds:
    """What the model will ask of the backend, for choosing one."""
    return OpNeeds(
        head_dim=model.head_dim,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        rope_dim=model.rope.dim,
        kv_dtype=kv_dtype(config, "cpu" if config.backend in ("auto", "cpu") else config.backend),
        block_size=config.block_size,
        sliding_window=any(w is not None for w in model.sliding_windows),
    )


class LocalExecutor:
    """Loads the model and runs steps of it. Raises ModelLoadError or ConfigError while loading."""

    def __init__(self, files: ModelFiles, config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> None:
        started = perf_counter()
        model_len = max_model_len(files.config, config)
        model_config = replace(files.config, max_position=model_len)
        self.model_config = files.config
        self.ops = make_ops(config, op_needs(model_config, config))
        specs = model_class(model_config.architecture).weights(model_config)
        weights = load_weights(files, specs, self.ops, progress)
        model = build_model(model_config, self.ops, weights)
        spec = kv_spec(model_config, config, self.ops)
        self.runner = ModelRunner(model, self.ops, (spec,), model_config.vocab_size)
        self._info = ExecutorInfo(
            kv_groups=(KVGroup(spec.num_blocks, spec.block_size),),
            vocab_size=model_config.vocab_size,
            max_model_len=model_len,
            block_bytes=(self.ops.kv_block_bytes(spec),),
        )
        self.load_seconds = perf_counter() - started
        _log.info("loaded %s in %.2f s: backend %s, %d KV blocks", files.name, self.load_seconds, self.ops.name, spec.num_blocks)

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def execute(self, output: SchedulerOutput) -> StepResult:
        return self.runner.execute(output)

    def close(self) -> None:
        """Nothing to stop: the ops' threads end with the object."""
