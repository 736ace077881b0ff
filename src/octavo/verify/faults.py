"""Faults for testing the verifier itself: each spoils one optimisation the way it has gone wrong in real engines.

A fault is made of wrappers around the executor, the model, the KV manager's pools, the outputs or the sampler's states, put in
place when a run is wired (`octavo verify --plant NAME`); no production code knows of them. Each names the row of the matrix that
must catch it. Stateless tables; a fault that remembers steps does so in the wrapper made for one run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.engine.block_pool import BlockKey, BlockPool, CachedBlock
from octavo.engine.engine_core import EngineCore
from octavo.engine.output_processor import Ending
from octavo.engine.request import Request
from octavo.engine.scheduler_output import SampledToken, SchedulerOutput, StepResult, TokenKind
from octavo.errors import ConfigError
from octavo.ops.api import ForwardBatch, Taps
from octavo.outputs import CompletionDelta


class FaultyExecutor:
    """An executor that changes what it is told (`change`), what the model sees (`before`), or what comes out of its layers
    (`after`); this one changes nothing."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.block_size = inner.info.kv_groups[0].block_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def change(self, output: SchedulerOutput) -> SchedulerOutput:
        return output

    def before(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def after(self, batch: ForwardBatch, hidden: Any) -> None:
        return None

    def execute(self, output: SchedulerOutput, taps: Taps | None = None) -> StepResult:
        runner = self.inner.runner
        model = runner.model
        runner.model = _FaultyModel(model, self)
        try:
            # Taps, even of nothing, force the eager path: what is replayed does not pass through the model object.
            result: StepResult = self.inner.execute(self.change(output), taps or Taps(frozenset()))
        finally:
            runner.model = model
        return result


class _FaultyModel:
    def __init__(self, inner: Any, fault: FaultyExecutor) -> None:
        self.inner, self.fault = inner, fault

    def forward(self, batch: ForwardBatch) -> Any:
        hidden = self.inner.forward(self.fault.before(batch))
        self.fault.after(batch, hidden)
        return hidden

    def logits(self, hidden: Any, num_generated: int) -> Any:
        return self.inner.logits(hidden, num_generated)


def _segments(batch: ForwardBatch) -> list[tuple[int, int, int]]:
    """(first row, last row + 1, position of the first row) of each segment."""
    bounds = batch.query_start_loc.tolist()
    return [(a, b, int(batch.positions[a])) for a, b in zip(bounds, bounds[1:], strict=False)]


class _BlockTableOffByOne(FaultyExecutor):
    def before(self, batch: ForwardBatch) -> ForwardBatch:
        tables = batch.block_tables[0].copy()
        for row, length in enumerate(batch.seq_lens.tolist()):
            used = -(-length // self.block_size)
            if length > batch.query_start_loc[row + 1] - batch.query_start_loc[row]:  # it reads KV of earlier steps
                tables[row, :used] = np.roll(tables[row, :used], 1)
        return replace(batch, block_tables=(tables, *batch.block_tables[1:]))


class _ChunkBorder(FaultyExecutor):
    """The first row of a later chunk writes its KV where the last row of the one before lies."""

    def before(self, batch: ForwardBatch) -> ForwardBatch:
        slots = batch.slot_mapping[0].copy()
        for first, _, start in _segments(batch):
            if first >= batch.num_generated and start % self.block_size:
                slots[first] -= 1
        return replace(batch, slot_mapping=(slots, *batch.slot_mapping[1:]))


class _BatchArithmetic(FaultyExecutor):
    """The last sum is taken in another order when there are neighbours: one unit in the last place."""

    def after(self, batch: ForwardBatch, hidden: Any) -> None:
        if len(batch.query_start_loc) > 2:
            np.nextafter(hidden, np.float32(np.inf), out=hidden)


class _ThreadSum(FaultyExecutor):
    """The same, when one thread takes the sum alone."""

    def after(self, batch: ForwardBatch, hidden: Any) -> None:
        if self.inner.ops.describe().get("threads") == 1:
            np.nextafter(hidden, np.float32(np.inf), out=hidden)


class _WrongScale(FaultyExecutor):
    """Attention scores are too large, in every run of this backend alike."""

    def before(self, batch: ForwardBatch) -> ForwardBatch:
        for layer in self.inner.runner.model.inner.layers:
            layer.attn.scale *= 2.0
        return batch

    def after(self, batch: ForwardBatch, hidden: Any) -> None:
        for layer in self.inner.runner.model.inner.layers:
            layer.attn.scale /= 2.0


class _NeighboursState(FaultyExecutor):
    """Two running requests are drawn for with each other's settings and history."""

    def execute(self, output: SchedulerOutput, taps: Taps | None = None) -> StepResult:
        known = self.inner.runner.input_batch.requests
        new = {request.request_id for request in output.new_requests}
        pair = [known[e.request_id] for e in output.entries if e.sample and e.request_id in known and e.request_id not in new][:2]
        if len(pair) < 2:
            return super().execute(output, taps)
        a, b = pair
        a.sampling, b.sampling = b.sampling, a.sampling
        try:
            return super().execute(output, taps)
        finally:
            a.sampling, b.sampling = b.sampling, a.sampling


class _TokensByOrder(FaultyExecutor):
    """Two tokens are handed out in order of arrival, whatever the order of the batch."""

    def execute(self, output: SchedulerOutput, taps: Taps | None = None) -> StepResult:
        result = super().execute(output, taps)
        pair = [e.request_id for e in output.entries if e.request_id in result.sampled][:2]
        if len(pair) == 2 and pair != sorted(pair):
            a, b = pair
            result.sampled[a], result.sampled[b] = result.sampled[b], result.sampled[a]
        return result


class _PositionAfterHit(FaultyExecutor):
    """A request that starts behind a cached prefix is rotated, and sees, as if one token earlier."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._hits: list[int] = []

    def change(self, output: SchedulerOutput) -> SchedulerOutput:
        new = {request.request_id for request in output.new_requests if "#" not in request.request_id}
        self._hits = [i for i, e in enumerate(output.entries) if e.request_id in new and e.start and e.kind is TokenKind.PROMPT]
        return output

    def before(self, batch: ForwardBatch) -> ForwardBatch:
        positions, segments = batch.positions.copy(), _segments(batch)
        for index in self._hits:
            first, last, _ = segments[index]
            positions[first:last] -= 1
        return replace(batch, positions=positions)


class _SharedTail(FaultyExecutor):
    """Copy on write forgets the copy: choices go on writing into the block they share."""

    def change(self, output: SchedulerOutput) -> SchedulerOutput:
        source = {copy.target: copy.source for copy in output.block_copies if copy.group == 0}
        entries = [
            e._replace(new_block_ids=(tuple(source.get(block, block) for block in e.new_block_ids[0]), *e.new_block_ids[1:]))
            for e in output.entries
        ]
        return replace(output, entries=entries, block_copies=[])


class _ResumeMissesToken(FaultyExecutor):
    def change(self, output: SchedulerOutput) -> SchedulerOutput:
        new = [
            replace(n, output_token_ids=[*n.output_token_ids[1:], n.output_token_ids[-1]]) if n.output_token_ids else n
            for n in output.new_requests
        ]
        return replace(output, new_requests=new)


class _StaleReplay(FaultyExecutor):
    """When the number of rows of a decode step changes, the last row keeps the position it had the step before."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._rows = 0

    def change(self, output: SchedulerOutput) -> SchedulerOutput:
        decode = all(e.kind is TokenKind.GENERATED and e.num_tokens == 1 for e in output.entries)
        before, self._rows = self._rows, len(output.entries) if decode else 0
        if not decode or not before or before == self._rows or not output.entries:
            return output
        last = output.entries[-1]
        return replace(output, entries=[*output.entries[:-1], last._replace(start=last.start - 1)])


def _stale_block(core: EngineCore) -> None:
    """A block is served as a hit for what comes before it alone: its own tokens are not looked at."""

    def spoil(pool: BlockPool) -> None:
        real = pool.lookup

        def lookup(key: BlockKey) -> CachedBlock | None:
            return real(key) or next((cached for known, cached in pool._index.items() if known.parent == key.parent), None)

        def serial_of(key: BlockKey) -> int | None:
            cached = lookup(key)
            return None if cached is None else cached.serial

        pool.lookup, pool.serial_of = lookup, serial_of  # type: ignore[method-assign]

    for pool in core.kv.pools:
        spoil(pool)


def _lost_piece(core: EngineCore) -> None:
    """The third piece of every text is lost where pieces are joined."""
    real, pieces = core.outputs.add_token, {}  # type: ignore[var-annotated]

    def add_token(request: Request, sampled: SampledToken) -> tuple[CompletionDelta, Ending | None]:
        delta, ending = real(request, sampled)
        if delta.text:
            pieces[request.request_id] = pieces.get(request.request_id, 0) + 1
            if pieces[request.request_id] == 3:
                delta.text = ""
        return delta, ending

    core.outputs.add_token = add_token  # type: ignore[method-assign]


class _Forgetful:
    """A stop checker that forgets what it withheld."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def push(self, text: str, *, enabled: bool = True) -> tuple[str, str | None]:
        found: tuple[str, str | None] = self.inner.push(text, enabled=enabled)
        return found

    def flush(self) -> str:
        self.inner.flush()
        return ""


def _lost_at_stop(core: EngineCore) -> None:
    """Text withheld because it might have become a stop string is lost at the end."""
    real = core.outputs._choice

    def choice(request: Request) -> Any:
        found: Any = real(request)
        if not isinstance(found.stop, _Forgetful):
            found.stop = _Forgetful(found.stop)
        return found

    core.outputs._choice = choice  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Fault:
    """`row`: what must catch it. `wrap`: of the executor of every run but the baseline's, `systematic`: of that too.
    `spoil`: changes an engine core's parts."""

    name: str
    row: str
    about: str
    wrap: Callable[[Any], Any] | None = None
    spoil: Callable[[EngineCore], None] | None = None
    systematic: bool = False

    def executor(self, inner: Any) -> Any:
        return inner if self.wrap is None else self.wrap(inner)

    def everywhere(self, inner: Any) -> Any:
        return self.executor(inner) if self.systematic else inner

    def plant(self, core: EngineCore) -> None:
        if self.spoil is not None:
            self.spoil(core)


NONE = Fault("", "", "nothing is wrong")
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("block-table", "kv cache", "block tables are off by one", _BlockTableOffByOne),
        Fault("chunk-border", "chunks of 7", "a chunk's first KV lands one slot too early", _ChunkBorder),
        Fault("batch-arithmetic", "batched", "a sum depends on the number of requests", _BatchArithmetic),
        Fault("neighbour-state", "batched", "sampling settings and penalties of a neighbour", _NeighboursState),
        Fault("tokens-by-order", "shuffled", "tokens go to requests by order of arrival", _TokensByOrder),
        Fault("stale-block", "prefix hit", "a cached block is served for other tokens", spoil=_stale_block),
        Fault("position-after-hit", "prefix hit", "positions after a prefix hit are one too small", _PositionAfterHit),
        Fault("resume", "preemption", "a resumed request has lost a token", _ResumeMissesToken),
        Fault("shared-tail", "fork n=4", "choices write into the block they share", _SharedTail),
        Fault("thread-sum", "threads 1", "a sum depends on the number of threads", _ThreadSum),
        Fault("stale-replay", "replayed", "a step is replayed with the rows of the one before", _StaleReplay),
        Fault("lost-piece", "streamed", "a piece of text is lost where a stream is joined", spoil=_lost_piece),
        Fault("lost-at-stop", "streamed", "withheld text is lost at the end", spoil=_lost_at_stop),
        Fault("wrong-scale", "reference", "attention scores are scaled wrongly everywhere", _WrongScale, systematic=True),
    )
}


def find_fault(name: str | None) -> Fault:
    """Raises ConfigError naming the faults there are."""
    if name is None:
        return NONE
    if name not in FAULTS:
        raise ConfigError(f"there is no fault {name!r} to plant: {', '.join(FAULTS)}")
    return FAULTS[name]
