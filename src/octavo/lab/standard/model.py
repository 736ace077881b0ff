"""LabModel: the engine's model, weights and kernels, driven by hand: no scheduler, no requests, one sequence.

    model = LabModel.load("smollm2", backend="cpu")
    logits = model.forward(ids)                    # everything computed, nothing kept
    cache = model.new_cache()
    logits = model.forward(ids, cache)             # computed and kept
    logits = model.forward([token], cache)         # only the new token

This is what a strategy (strategy.py) is given. Owner of its caches' blocks. Not here: choosing tokens (decoding.py).

The arithmetic of a row may follow its kind, prompt or generated (docs/numerics.md). The kind is decided by the position:
what lies below `num_prompt_tokens` is prompt. So a token computed again is computed as the first time, and on the native
kernels recomputing everything gives the same bits as a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import OctavoError
from octavo.ops.api import ForwardBatch
from octavo.wiring import EngineParts, LoadProgress, make_config

Logits = npt.NDArray[np.float32]


class StrategyError(OctavoError):
    """A decoding loop asked for something that makes no sense; the message says what."""


@dataclass(slots=True)
class Cache:
    """K and V of the tokens computed so far, in blocks of the pool. `length` tokens are valid."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(slots=True)
class Forward:
    """What one call computed: for the record of a run."""

    first_position: int
    token_ids: list[int]
    #: When it was done, by time.perf_counter.
    done: float
    #: float32 [last, vocab]; kept only while `keep_logits` is set.
    logits: Logits | None


class LabModel:
    def __init__(self, parts: EngineParts) -> None:
        executor: Any = parts.executor  # a LocalExecutor: EngineParts.load made it
        self.parts = parts
        self.ops = executor.ops
        self.runner = executor.runner
        groups = executor.info.kv_groups  # every sequence lies in the same blocks of each
        self.block_size: int = groups[0].block_size
        self._num_blocks: int = min(group.num_blocks for group in groups)
        self.max_length: int = min(executor.info.max_model_len, self._num_blocks * self.block_size)
        self.vocab_size: int = executor.info.vocab_size
        self.eos_token_ids = parts.eos_token_ids
        #: Tokens below this position are prompt rows, the others generated rows.
        self.num_prompt_tokens = 0
        self.keep_logits = False
        self.record: list[Forward] = []
        self._free = list(range(self._num_blocks))[::-1]

    @classmethod
    def load(cls, model: str = "smollm2", *, backend: str = "auto", progress: LoadProgress | None = None, **settings: Any) -> LabModel:
        """Raises ConfigError or ModelLoadError. Settings are those of EngineConfig."""
        return cls(EngineParts.load(make_config(model, None, {"backend": backend, **settings}), progress))

    @property
    def backend(self) -> str:
        return str(self.ops.name)

    @property
    def tokenizer(self) -> Any:
        return self.parts.tokenizer

    def begin(self, num_prompt_tokens: int) -> None:
        """Start a run: the record is empty, every cache of the run before is void."""
        self.num_prompt_tokens = num_prompt_tokens
        self.record = []
        self._free = list(range(self.max_length // self.block_size))[::-1]

    def new_cache(self) -> Cache:
        return Cache()

    def forward(self, token_ids: Sequence[int], cache: Cache | None = None, *, position: int | None = None, last: int = 1) -> Logits:
        """Logits of the `last` tokens of token_ids, float32 [last, vocab], a copy: row i says what may follow token i.

        With a cache, the tokens follow those in it, and stay in it. `position`: put the first of them there instead, at
        most cache.length: what the cache held from there on is overwritten and forgotten. Without a cache they are the
        whole sequence. Raises StrategyError for what cannot be.
        """
        start = (0 if cache is None else cache.length) if position is None else position
        self._check(token_ids, cache, start, last)
        kept, cache = cache, cache or self.new_cache()
        end = start + len(token_ids)
        while len(cache.blocks) * self.block_size < end:
            if not self._free:
                raise StrategyError(f"the KV pool is full: it holds {self.max_length} tokens over all caches")
            cache.blocks.append(self._free.pop())
        cache.length = end
        logits = self._run(np.asarray(token_ids, np.int32), cache, start, last)
        if kept is None:
            self._free += cache.blocks[::-1]
        entry = Forward(start, [int(token) for token in token_ids], perf_counter(), logits.copy() if self.keep_logits else None)
        self.record.append(entry)
        return logits

    def _check(self, token_ids: Sequence[int], cache: Cache | None, start: int, last: int) -> None:
        if not len(token_ids) or not 1 <= last <= len(token_ids):
            raise StrategyError(f"forward needs at least one token, and `last` of them; got {len(token_ids)} tokens and last={last}")
        if not all(0 <= token < self.vocab_size for token in token_ids):
            raise StrategyError(f"token ids must be between 0 and {self.vocab_size - 1}, got {list(token_ids)[:10]}")
        if not 0 <= start <= (0 if cache is None else cache.length):
            raise StrategyError(f"position {start} leaves a hole: the cache holds {0 if cache is None else cache.length} tokens")
        if start + len(token_ids) > self.max_length:
            raise StrategyError(f"{start + len(token_ids)} tokens do not fit, the longest sequence is {self.max_length}")

    def _run(self, token_ids: npt.NDArray[np.int32], cache: Cache, start: int, last: int) -> Logits:
        batch, rows = self._batch(token_ids, cache, start, last)
        self.ops.begin_step(batch.num_rows)
        hidden = self.runner.model.forward(self.ops.to_device(batch))
        logits: Logits = self.ops.to_numpy(self.runner.model.logits(hidden, batch.num_generated_logits))
        return logits[rows].copy()

    def _batch(self, token_ids: npt.NDArray[np.int32], cache: Cache, start: int, last: int) -> tuple[ForwardBatch, npt.NDArray[np.int64]]:
        """The step, generated rows first, then prompt rows, as segments of one sequence; and where in the logits the
        rows of the `last` tokens are. K and V of all rows are written before any row attends, so the order is free."""
        count, end = len(token_ids), start + len(token_ids)
        prompt = min(max(self.num_prompt_tokens - start, 0), count)  # how many of the tokens are prompt
        order = np.r_[prompt:count, 0:prompt]
        generated = count - prompt
        segments = [(generated, end), (prompt, start + prompt)]  # (rows, tokens of the sequence after them)
        segments = [segment for segment in segments if segment[0]]
        positions = (start + order).astype(np.int32)
        blocks = np.asarray(cache.blocks, np.int32)
        slots = blocks[positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
        wanted = np.flatnonzero(order >= count - last).astype(np.int32)
        batch = ForwardBatch(
            token_ids=token_ids[order],
            positions=positions,
            query_start_loc=np.cumsum([0, *(rows for rows, _ in segments)]).astype(np.int32),
            seq_lens=np.array([length for _, length in segments], np.int32),
            block_tables=(np.tile(blocks, (len(segments), 1)),) * len(self.runner.kv),
            slot_mapping=(slots,) * len(self.runner.kv),
            num_generated=generated,
            logits_rows=wanted,
            num_generated_logits=int(np.searchsorted(wanted, generated)),
            kv=self.runner.kv,
        )
        return batch, np.argsort(order[wanted])

    def close(self) -> None:
        self.parts.executor.close()
