"""Executor: the one thing the engine knows about whatever computes (a local model, a fake, later ranks and Ray workers).

Owner: the caller of EngineCore builds it (llm.py wires); the engine core calls it from one thread, one step at a time.
Not here: any implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.engine.scheduler_output import SchedulerOutput, StepResult


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table. One group today; window layers will be a second one."""

    num_blocks: int
    block_size: int
    #: None: attention sees every earlier token.
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the engine must know of the model and the pool; fixed for the executor's life."""

    kv_groups: tuple[KVGroup, ...]
    vocab_size: int
    #: The model's limit, already lowered to the configured max_model_len.
    max_model_len: int
    #: A row holds KV of `block_bytes` for all layers of a group and one block; for messages and metrics.
    block_bytes: tuple[int, ...]


class Executor(Protocol):
    @property
    def info(self) -> ExecutorInfo: ...

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step. An exception means the executor is broken: the engine core dies with it."""
        ...

    def close(self) -> None: ...
