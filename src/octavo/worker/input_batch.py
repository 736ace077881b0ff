"""InputBatch: what a worker remembers of the running requests, and the flat arrays of a step made from it.

Owner of the worker's copy of tokens and block tables: the scheduler names a request by its id and sends only what is
new. Not here: the model, the pool, any decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.engine.scheduler_output import NewRequest, ScheduledEntry, SchedulerOutput, TokenKind
from octavo.ops.api import ForwardBatch, Taps
from octavo.sampling.state import SamplingState

#: Tokens and blocks a new request has room for; both arrays double when full.
_FIRST_CAPACITY = 64


class RunningRequest:
    """Tokens, block tables and sampling state of one request."""

    def __init__(self, new: NewRequest, num_groups: int, vocab_size: int) -> None:
        self.num_prompt_tokens = len(new.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens + len(new.output_token_ids)
        self.tokens = np.empty(max(_FIRST_CAPACITY, self.num_tokens * 2), dtype=np.int32)
        self.tokens[: self.num_tokens] = [*new.prompt_token_ids, *new.output_token_ids]
        self.tables = [np.zeros(_FIRST_CAPACITY, dtype=np.int32) for _ in range(num_groups)]
        self.num_blocks = [0] * num_groups
        self.prompt_logprobs = new.sampling_params.prompt_logprobs
        self.sampling = SamplingState(
            new.sampling_params,
            new.seed,
            new.choice,
            new.prompt_token_ids,
            new.output_token_ids,
            new.stop_token_ids,
            new.bad_words_ids,
            vocab_size,
        )

    def append_token(self, token_id: int) -> None:
        if self.num_tokens == self.tokens.shape[0]:
            self.tokens = np.concatenate([self.tokens, np.empty_like(self.tokens)])
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.sampling.append(token_id)

    def append_blocks(self, group: int, block_ids: Sequence[int]) -> None:
        start, end = self.num_blocks[group], self.num_blocks[group] + len(block_ids)
        table = self.tables[group]
        if end > table.shape[0]:
            table = self.tables[group] = np.concatenate([table, np.zeros(max(end, table.shape[0]), dtype=np.int32)])
        table[start:end] = block_ids
        self.num_blocks[group] = end


class StepArrays:
    """The arrays of a step by name, kept from step to step; they double when they are too small."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._tables: dict[int, npt.NDArray[np.int32]] = {}
        self._counting = np.arange(_FIRST_CAPACITY, dtype=np.int32)

    def take(self, name: str, size: int, dtype: type = np.int32) -> npt.NDArray[Any]:
        """[size], uninitialised."""
        array = self._arrays.get(name)
        if array is None or array.shape[0] < size:
            array = self._arrays[name] = np.empty(max(_FIRST_CAPACITY, 2 * size), dtype)
        return array[:size]

    def table(self, group: int, rows: int, columns: int) -> npt.NDArray[np.int32]:
        """int32 [rows, columns]: block numbers of earlier steps, at first zeros."""
        table = self._tables.get(group)
        if table is None or table.shape[0] < rows or table.shape[1] < columns:
            table = self._tables[group] = np.zeros((max(_FIRST_CAPACITY, 2 * rows), max(_FIRST_CAPACITY, 2 * columns)), np.int32)
        return table[:rows, :columns]

    def counting(self, end: int) -> npt.NDArray[np.int32]:
        """int32 [end]: 0, 1, ...; to be read only."""
        if end > self._counting.shape[0]:
            self._counting = np.arange(2 * end, dtype=np.int32)
        return self._counting[:end]


class InputBatch:
    def __init__(self, block_sizes: Sequence[int], vocab_size: int) -> None:
        self.block_sizes = tuple(block_sizes)
        self.vocab_size = vocab_size
        self.requests: dict[str, RunningRequest] = {}
        self._arrays = StepArrays()

    def apply(self, output: SchedulerOutput) -> None:
        """Forget dropped requests, take up new ones, lengthen block tables."""
        for request_id in output.dropped_request_ids:
            self.requests.pop(request_id, None)
        for new in output.new_requests:
            self.requests[new.request_id] = RunningRequest(new, len(self.block_sizes), self.vocab_size)
        for entry in output.entries:
            request = self.requests[entry.request_id]
            for group, block_ids in enumerate(entry.new_block_ids):
                if block_ids:
                    request.append_blocks(group, block_ids)

    def build(self, entries: Sequence[ScheduledEntry], kv: tuple[Any, ...], taps: Taps | None = None) -> ForwardBatch:
        """The flat arrays of a step, on the CPU, valid until the next call. Shapes: ops/api.py, ForwardBatch."""
        requests = [self.requests[e.request_id] for e in entries]
        num_segments, num_rows = len(entries), sum(e.num_tokens for e in entries)
        arrays = self._arrays
        token_ids, query_start_loc = arrays.take("token_ids", num_rows), arrays.take("query_start_loc", num_segments + 1)
        positions, seq_lens = arrays.take("positions", num_rows), arrays.take("seq_lens", num_segments)
        row = query_start_loc[0] = 0
        for i, (entry, request) in enumerate(zip(entries, requests, strict=True)):
            start, count = entry.start, entry.num_tokens
            first, row = row, row + count
            query_start_loc[i + 1], seq_lens[i] = row, start + count
            if count == 1:  # most entries of most steps: single values are cheaper than slices
                token_ids[first], positions[first] = request.tokens[start], start
            else:
                token_ids[first:row] = request.tokens[start : start + count]
                positions[first:row] = arrays.counting(start + count)[start:]
        num_generated = sum(e.num_tokens for e in entries if e.kind is TokenKind.GENERATED)
        logits_rows = self._logits_rows(entries, requests, query_start_loc)
        groups = range(len(self.block_sizes))
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=tuple(self._block_table(requests, group) for group in groups),
            slot_mapping=tuple(self._slots(entries, requests, group, num_rows) for group in groups),
            num_generated=num_generated,
            logits_rows=logits_rows,
            num_generated_logits=int(np.searchsorted(logits_rows, num_generated)),
            kv=kv,
            taps=taps,
        )

    def _block_table(self, requests: Sequence[RunningRequest], group: int) -> npt.NDArray[np.int32]:
        """int32 [S, most blocks]; past a request's own blocks stands whatever an earlier step left there: valid, but unused."""
        width = max((r.num_blocks[group] for r in requests), default=0)
        table = self._arrays.table(group, len(requests), width)
        for row, request in enumerate(requests):
            count = request.num_blocks[group]
            table[row, :count] = request.tables[group][:count]
        return table

    def _slots(
        self, entries: Sequence[ScheduledEntry], requests: Sequence[RunningRequest], group: int, num_rows: int
    ) -> npt.NDArray[np.int64]:
        """int64 [T]: block * block size + offset of each row."""
        size, slots = self.block_sizes[group], self._arrays.take(f"slots {group}", num_rows, np.int64)
        row = 0
        for entry, request in zip(entries, requests, strict=True):
            start, count, table = entry.start, entry.num_tokens, request.tables[group]
            first, row = row, row + count
            if count == 1:
                slots[first] = int(table[start // size]) * size + start % size
            else:
                positions = self._arrays.counting(start + count)[start:]
                slots[first:row] = table[positions // size].astype(np.int64) * size + positions % size
        return slots

    @staticmethod
    def _logits_rows(
        entries: Sequence[ScheduledEntry], requests: Sequence[RunningRequest], query_start_loc: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """The last row of an entry that samples; every prompt row of a request that wants prompt logprobs."""
        rows: list[int] = []
        for first, entry, request in zip(query_start_loc.tolist(), entries, requests, strict=False):
            if request.prompt_logprobs is not None and entry.kind is TokenKind.PROMPT:
                rows.extend(range(first, first + entry.num_tokens))
            elif entry.sample:
                rows.append(first + entry.num_tokens - 1)
        return np.array(rows, dtype=np.int32)
