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


class InputBatch:
    def __init__(self, block_sizes: Sequence[int], vocab_size: int) -> None:
        self.block_sizes = tuple(block_sizes)
        self.vocab_size = vocab_size
        self.requests: dict[str, RunningRequest] = {}

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
        """The flat arrays of a step, on the CPU. Shapes: ops/api.py, ForwardBatch."""
        num_segments = len(entries)
        lengths = np.fromiter((e.num_tokens for e in entries), dtype=np.int32, count=num_segments)
        starts = np.fromiter((e.start for e in entries), dtype=np.int32, count=num_segments)
        query_start_loc = np.zeros(num_segments + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start_loc[1:])
        num_rows = int(query_start_loc[-1])
        token_ids = np.empty(num_rows, dtype=np.int32)
        requests = [self.requests[e.request_id] for e in entries]
        for row, entry, request in zip(query_start_loc.tolist(), entries, requests, strict=False):
            token_ids[row : row + entry.num_tokens] = request.tokens[entry.start : entry.start + entry.num_tokens]
        segment = np.repeat(np.arange(num_segments, dtype=np.int32), lengths)
        positions = np.arange(num_rows, dtype=np.int32) - (query_start_loc[:-1] - starts)[segment]
        tables = tuple(self._block_table(requests, group) for group in range(len(self.block_sizes)))
        slots = tuple(
            table[segment, positions // size].astype(np.int64) * size + positions % size
            for table, size in zip(tables, self.block_sizes, strict=True)
        )
        num_generated = sum(e.num_tokens for e in entries if e.kind is TokenKind.GENERATED)
        logits_rows = self._logits_rows(entries, requests, query_start_loc)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=starts + lengths,
            block_tables=tables,
            slot_mapping=slots,
            num_generated=num_generated,
            logits_rows=logits_rows,
            num_generated_logits=int(np.searchsorted(logits_rows, num_generated)),
            kv=kv,
            taps=taps,
        )

    def _block_table(self, requests: Sequence[RunningRequest], group: int) -> npt.NDArray[np.int32]:
        width = max((r.num_blocks[group] for r in requests), default=0)
        table = np.zeros((len(requests), width), dtype=np.int32)
        for row, request in enumerate(requests):
            count = request.num_blocks[group]
            table[row, :count] = request.tables[group][:count]
        return table

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
