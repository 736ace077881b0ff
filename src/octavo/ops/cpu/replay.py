"""StepReplayer: the native calls of a forward pass, recorded once and replayed by one call for any number of rows.

While a step is recorded, CpuOps calls a `_Recorder` in the place of its native Context: each call runs as always and is then
appended to a native Program. Layers and models notice nothing. A recording holds as long as the arena's addresses do
(`Arena.epoch`) and the batch names the same KV pools; after that the next step is recorded again.
Owner: CpuOps makes one, the worker's model runner calls it. Not here: what is recorded of an operation (native/src/program.h).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo import _native
from octavo.ops.api import Array, ForwardBatch
from octavo.ops.arena import Arena

_log = logging.getLogger("octavo")


@dataclass(frozen=True, slots=True)
class _Recording:
    program: _native.Program
    epoch: int
    kv: tuple[Any, ...]
    #: Where in the arena the logits are taken, and how wide they are.
    position: int
    columns: int


class _Recorder:
    """A Context whose calls are also appended to a program, as long as all of them can be."""

    def __init__(self, context: _native.Context, program: _native.Program, arena: Arena) -> None:
        self._context = context
        self.program = program
        self._arena = arena
        self._num_chunks = 0
        #: Why the step cannot be replayed.
        self.refused: str | None = None

    def __getattr__(self, op: str) -> Callable[..., None]:
        run = getattr(self._context, op)

        def call(*args: Any) -> None:
            run(*args)
            if self.refused is None:
                self.refused = self._append(op, args)

        return call

    def _append(self, op: str, args: tuple[Any, ...]) -> str | None:
        """Records a call that has just run, or says why it cannot be."""
        for chunk in self._arena.buffers[self._num_chunks :]:  # the arena grows while a step takes from it
            self.program.add_chunk(chunk)
            self._num_chunks += 1
        append = getattr(self.program, op, None)
        if append is None:
            return f"{op} is not among the operations a program knows"
        try:
            append(*args)
        except (TypeError, ValueError) as error:
            return f"{op}: {str(error).partition(chr(10))[0]}"
        return None


class StepReplayer:
    """Implements `Replayer` of ops/api.py for one CpuOps.

    swap: puts its argument in the place of the native context.
    """

    def __init__(self, context: _native.Context, arena: Arena, swap: Callable[[Any], None]) -> None:
        self._context = context
        self._arena = arena
        self._swap = swap
        self._recording: _Recording | None = None
        self._refused = False

    def replay(self, batch: ForwardBatch) -> Array | None:
        recording = self._recording
        if recording is None or recording.epoch != self._arena.epoch or recording.kv is not batch.kv:
            return None
        self._context.replay(recording.program, *_inputs(batch))
        return self._arena.take_at(recording.position, len(batch.logits_rows), recording.columns)

    def record(self, batch: ForwardBatch, forward: Callable[[], Array]) -> Array:
        arena = self._arena
        if self._refused or not len(batch.logits_rows):
            return forward()
        self._recording = None
        epoch = arena.epoch
        recorder = _Recorder(self._context, _native.Program(arena.capacity_rows, *_inputs(batch)), arena)
        self._swap(recorder)
        try:
            logits = forward()
        finally:
            self._swap(self._context)
        position = arena.position_of(logits)
        refused = recorder.refused or ("the logits do not lie in the arena" if position is None else None)
        if refused is not None:
            self._refused = True
            _log.warning("steps run eagerly, they cannot be recorded: %s", refused)
        elif position is not None and epoch == arena.epoch:
            self._recording = _Recording(recorder.program, epoch, batch.kv, position, logits.shape[1])
        return logits


def _inputs(batch: ForwardBatch) -> tuple[Any, ...]:
    """What a program reads of a batch, in the order of BatchInputs (native/src/program.h)."""
    arrays = (batch.token_ids, batch.positions, batch.query_start_loc, batch.logits_rows, batch.slot_mapping, batch.block_tables)
    return *arrays, batch.num_generated, batch.num_generated_logits
