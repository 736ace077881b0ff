"""ModelRunner: one step. From a SchedulerOutput to the flat batch, through the model once, to drawn tokens.

Owner of the KV pool, the model, the sampler that goes with the backend, and the worker's request state. A fault of one
row (non-finite logits) ends that request only. Not here: what to run (engine/scheduler.py), how to draw (sampling/).
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
import numpy.typing as npt

from octavo.engine.scheduler_output import BlockCopy, SampledToken, ScheduledEntry, SchedulerOutput, StepResult, TokenKind
from octavo.models.registry import Model
from octavo.ops.api import Array, ForwardBatch, KVSpec, Ops, Taps
from octavo.outputs import PositionLogprobs
from octavo.sampling.native import make_sampler
from octavo.sampling.sampler import NO_TOKEN
from octavo.worker.input_batch import InputBatch

#: Prompt logprobs turn this many rows into logits at a time: 64 rows of 150k float32 are 39 MB.
LOGITS_CHUNK = 64
NON_FINITE = "the model produced logits that are not finite"
#: Called with (request id, position of the first row, float32 [rows, V]: void after the call).
LogitsReader = Callable[[str, int, npt.NDArray[np.float32]], None]


class ModelRunner:
    def __init__(self, model: Model, ops: Ops, kv_specs: tuple[KVSpec, ...], vocab_size: int, replay: bool = True) -> None:
        self.model = model
        self._replayer = ops.replayer() if replay else None
        self.ops = ops
        self.kv = tuple(ops.alloc_kv(spec) for spec in kv_specs)
        self.sampler = make_sampler(ops)
        self.input_batch = InputBatch([spec.block_size for spec in kv_specs], vocab_size)
        #: Sees the logits of every row that has any, before anything is drawn from them (`octavo verify`).
        self.read_logits: LogitsReader | None = None

    def execute(self, output: SchedulerOutput, taps: Taps | None = None) -> StepResult:
        """Run the step; KV of every row is written when it returns."""
        started = perf_counter()
        self.input_batch.apply(output)
        self._copy_blocks(output.block_copies)
        result = StepResult()
        if not output.entries:
            return result
        batch = self.input_batch.build(output.entries, self.kv, taps)
        self.ops.begin_step(batch.num_rows)
        prepared = perf_counter()
        if taps is not None or self._wants_prompt_logprobs(output.entries):
            hidden = self.model.forward(self.ops.to_device(batch))
            forwarded = perf_counter()
            self._logits_and_tokens(output.entries, batch, hidden, result)
        else:
            logits, result.replayed = self.forward(batch)
            forwarded = perf_counter()
            sampling = [entry for entry in output.entries if entry.sample]
            if sampling:
                self._sample(sampling, self.ops.to_numpy(logits), result)
        done = perf_counter()
        result.timings = {"prepare": prepared - started, "forward": forwarded - prepared, "sample": done - forwarded}
        return result

    def forward(self, batch: ForwardBatch) -> tuple[Array, bool]:
        """Logits [R, vocab] of batch.logits_rows (nothing of use where there are none), and whether they were replayed."""
        if self._replayer is None:
            return self._eager(batch), False
        logits = self._replayer.replay(batch)
        if logits is not None:
            return logits, True
        return self._replayer.record(batch, lambda: self._eager(batch)), False

    def _eager(self, batch: ForwardBatch) -> Array:
        hidden = self.model.forward(self.ops.to_device(batch))
        return self.model.logits(hidden, batch.num_generated_logits) if batch.logits_rows.shape[0] else hidden

    def _wants_prompt_logprobs(self, entries: list[ScheduledEntry]) -> bool:
        requests = self.input_batch.requests
        return any(e.kind is TokenKind.PROMPT and requests[e.request_id].prompt_logprobs is not None for e in entries)

    def _copy_blocks(self, copies: list[BlockCopy]) -> None:
        for group, kv in enumerate(self.kv):
            pairs = [(c.source, c.target) for c in copies if c.group == group]
            if pairs:
                self.ops.copy_blocks(kv, [s for s, _ in pairs], [t for _, t in pairs])

    def _logits_and_tokens(self, entries: list[ScheduledEntry], batch: ForwardBatch, hidden: Array, result: StepResult) -> None:
        """Logits of the rows that sample in one piece; rows that only report prompt logprobs in chunks."""
        requests = self.input_batch.requests
        rows: list[int] = []  # of `hidden`, one for each entry that samples
        sampling: list[ScheduledEntry] = []
        cursor = 0
        for entry in entries:
            wants_all = requests[entry.request_id].prompt_logprobs is not None and entry.kind is TokenKind.PROMPT
            count = entry.num_tokens if wants_all else int(entry.sample)
            if wants_all:
                self._prompt_logprobs(entry, hidden, cursor, result)
            if entry.sample:
                rows.append(cursor + count - 1)
                sampling.append(entry)
            cursor += count
        if not sampling:
            return
        if len(rows) != batch.logits_rows.shape[0]:
            hidden = self.ops.take_rows(hidden, self._index(rows))
        num_generated = sum(e.kind is TokenKind.GENERATED for e in sampling)
        logits = self.ops.to_numpy(self.model.logits(hidden, num_generated))
        if batch.taps is not None and "logits" in batch.taps.names:
            batch.taps.values["logits"] = logits.copy()
        self._sample(sampling, logits, result)

    def _index(self, rows: list[int]) -> Array:
        """Row numbers as the backend wants them."""
        return np.array(rows, dtype=np.int32)

    def _sample(self, entries: list[ScheduledEntry], logits: npt.NDArray[np.float32], result: StepResult) -> None:
        requests = [self.input_batch.requests[e.request_id] for e in entries]
        if self.read_logits is not None:
            for row, entry in enumerate(entries):
                self.read_logits(entry.request_id, entry.start + entry.num_tokens - 1, logits[row : row + 1])
        token_ids, logprobs = self.sampler.sample(logits, [r.sampling for r in requests])
        for entry, request, token_id, entry_logprobs in zip(entries, requests, token_ids.tolist(), logprobs, strict=True):
            if token_id == NO_TOKEN:
                result.errors[entry.request_id] = NON_FINITE
                continue
            request.append_token(token_id)
            result.sampled[entry.request_id] = SampledToken(token_id, entry_logprobs)

    def _prompt_logprobs(self, entry: ScheduledEntry, hidden: Array, first: int, result: StepResult) -> None:
        """Logprobs of the prompt tokens that follow this entry's rows; `first` is its first row in `hidden`."""
        request = self.input_batch.requests[entry.request_id]
        assert request.prompt_logprobs is not None
        targets = request.tokens[entry.start + 1 : min(entry.start + entry.num_tokens + 1, request.num_prompt_tokens)]
        found: list[PositionLogprobs] = []
        for chunk in range(0, len(targets), LOGITS_CHUNK):
            wanted = targets[chunk : chunk + LOGITS_CHUNK]
            with self.ops.arena.scope():
                logits = self.ops.to_numpy(self.model.logits(hidden[first + chunk : first + chunk + len(wanted)], 0))
                if self.read_logits is not None:
                    self.read_logits(entry.request_id, entry.start + chunk, logits)
                if not np.isfinite(logits).all():
                    result.errors[entry.request_id] = NON_FINITE
                    return
                found.extend(self.sampler.prompt_logprobs(logits, wanted, request.prompt_logprobs))
        result.prompt_logprobs[entry.request_id] = found
