"""Executor: the one thing the engine knows about whatever computes (a local model, a fake, later ranks and Ray workers).

Owner: the caller of EngineCore builds it (llm.py wires); the engine core calls it from one thread, one step at a time.
Not here: any implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from octavo.engine.scheduler_output import ExecutorInfo, KVGroup, SchedulerOutput, StepResult

__all__ = ["Clock", "Executor", "ExecutorInfo", "KVGroup"]

#: Seconds on a clock that never goes back: time.perf_counter, or a simulated one where the executor only says what a step costs.
Clock = Callable[[], float]


class Executor(Protocol):
    @property
    def info(self) -> ExecutorInfo: ...

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step. An exception means the executor is broken: the engine core dies with it."""
        ...

    def close(self) -> None: ...
