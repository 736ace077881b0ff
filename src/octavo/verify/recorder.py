"""Recorder: the executor of production, with a reader beside it.

It asks the worker for the logits of prompt rows too (as a request with prompt_logprobs would), hands every row of raw logits
to a Watch before anything is drawn from it, and taps the layers of one row where the Watch wants to know. Nothing it does
changes what is scheduled, computed or drawn.
Owner: whoever wires an engine with it; it owns nothing. Not here: comparing (comparison.py), planting faults (faults.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.engine.executor import ExecutorInfo
from octavo.engine.scheduler_output import SchedulerOutput, StepResult
from octavo.ops.api import Taps

FloatArray = npt.NDArray[np.float32]


class Watch(Protocol):
    """Who reads. Request ids are the worker's: `3.0` is a prompt, `3.0#1` one of its choices."""

    def logits(self, request_id: str, position: int, rows: FloatArray) -> None:
        """Raw logits after positions `position`, ...: float32 [rows, V], void after the call."""
        ...

    def tap(self, output: SchedulerOutput) -> tuple[Taps, RowValues] | None:
        """Taps for this step, if one of its rows is wanted layer by layer."""
        ...


class RowValues(dict[str, Any]):
    """Values of Taps that keep one row of each: whole steps of all layers would be gigabytes."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row

    def __setitem__(self, name: str, value: FloatArray) -> None:
        super().__setitem__(name, value[self.row].copy())


@dataclass(slots=True)
class Target:
    """One row: of a request, at a position, the `occurrence`-th time it is computed (a preemption computes it again)."""

    request_id: str
    position: int
    occurrence: int = 0

    def row_in(self, output: SchedulerOutput) -> int | None:
        """Its row in this step's flat batch, if it is there."""
        first = 0
        for entry in output.entries:
            if entry.request_id == self.request_id and entry.start <= self.position < entry.start + entry.num_tokens:
                return first + self.position - entry.start
            first += entry.num_tokens
        return None


class Recorder:
    """`inner` is a LocalExecutor, or a wrapper of one. num_blocks: claim a smaller pool than there is."""

    def __init__(self, inner: Any, watch: Watch, *, all_prompt_rows: bool = True, num_blocks: int | None = None) -> None:
        self.inner = inner
        self.watch = watch
        self.all_prompt_rows = all_prompt_rows
        info: ExecutorInfo = inner.info
        groups = info.kv_groups
        if num_blocks is not None:
            groups = tuple(replace(group, num_blocks=min(group.num_blocks, num_blocks)) for group in groups)
        self._info = replace(info, kv_groups=groups)

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def execute(self, output: SchedulerOutput) -> StepResult:
        if self.all_prompt_rows:
            new = [replace(n, sampling_params=replace(n.sampling_params, prompt_logprobs=0)) for n in output.new_requests]
            output = replace(output, new_requests=new)
        tapped = self.watch.tap(output)
        self.inner.runner.read_logits = self.watch.logits
        try:
            result: StepResult = self.inner.execute(output) if tapped is None else self.inner.execute(output, tapped[0])
        finally:
            self.inner.runner.read_logits = None
        result.prompt_logprobs.clear()  # the engine did not ask
        return result

    def close(self) -> None:
        """Forget the requests of this run; the model stays loaded for the next one."""
        self.inner.runner.input_batch.requests.clear()
