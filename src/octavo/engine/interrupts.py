"""InterruptGate: Ctrl-C arrives where half-done work can be undone, and nowhere else.

Python runs the handler of SIGINT between any two bytecodes of the main thread, and the default one raises. In the middle
of the engine's bookkeeping that would lose a delta or forget a request. Inside the gate an interrupt therefore waits;
while the model computes, which can take seconds, it is let through (EngineCore undoes that part of a step).
Owner: one per LLM, entered under its lock. Not here: what an interrupt means for requests (engine_core.py, llm.py).
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from octavo.engine.executor import Executor, ExecutorInfo
from octavo.engine.scheduler_output import SchedulerOutput, StepResult


class InterruptGate:
    """`with gate:` SIGINT's handler runs on leaving. Only in the main thread, where handlers run; may be nested."""

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None
        self._pending: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> InterruptGate:
        if threading.current_thread() is threading.main_thread():
            if self._depth == 0:
                self._handler = signal.getsignal(signal.SIGINT)
                self.close()
            self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0:
                self.open()

    def close(self) -> None:
        """From now on an interrupt waits. A handler that is no Python function (ignored, default action) stays."""
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._remember)

    def open(self) -> None:
        """Run the handler of an interrupt that waited; later ones come through."""
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
        pending, self._pending = self._pending, None
        if pending is not None:
            self._handler(*pending)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._pending = number, frame

    @property
    def is_mine(self) -> bool:
        """This thread is inside the gate, and is the main thread."""
        return self._depth > 0 and threading.current_thread() is threading.main_thread()


class InterruptibleExecutor:
    """An executor during whose steps the gate is open."""

    def __init__(self, executor: Executor, gate: InterruptGate) -> None:
        self._executor = executor
        self._gate = gate

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def execute(self, output: SchedulerOutput) -> StepResult:
        if not self._gate.is_mine:
            return self._executor.execute(output)
        try:
            self._gate.open()
            return self._executor.execute(output)
        finally:
            self._gate.close()

    def close(self) -> None:
        self._executor.close()
