"""Raw logits of a loaded model, through the same batch builder and KV pool as the engine uses, without a scheduler.

The test says which rows are prompt and which generated, and in which chunks; blocks are dealt out here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from octavo.config import EngineConfig
from octavo.engine.scheduler_output import NewRequest, ScheduledEntry, SchedulerOutput, TokenKind
from octavo.loading.source import resolve_source
from octavo.ops.api import ForwardBatch, Taps
from octavo.sampling_params import SamplingParams
from octavo.worker.executor import LocalExecutor

LOGITS_ROWS = 64


def load(path: str | Path, **settings: object) -> LocalExecutor:
    settings = {"num_kv_blocks": 256, **settings}
    return LocalExecutor(resolve_source(str(path)), EngineConfig(model=str(path), **settings))


class Sequences:
    """Sequences that live in one pool; every block is handed out once, in a shuffled order when given a generator."""

    def __init__(self, executor: LocalExecutor, rng: np.random.Generator | None = None) -> None:
        self.executor = executor
        self.runner = executor.runner
        self.num_groups = len(executor.info.kv_groups)
        group = min(executor.info.kv_groups, key=lambda group: group.num_blocks)
        self.block_size = group.block_size
        order = np.arange(group.num_blocks) if rng is None else rng.permutation(group.num_blocks)
        self.free = iter(order.tolist())
        self.held: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.prompt_len: dict[str, int] = {}

    def add(self, name: str, tokens: Sequence[int], num_prompt: int | None = None) -> None:
        """`tokens` are all known already; those from num_prompt on count as generated."""
        num_prompt = len(tokens) if num_prompt is None else num_prompt
        new = NewRequest(name, list(tokens[:num_prompt]), list(tokens[num_prompt:]), SamplingParams().resolve({}), 0, 0)
        self.runner.input_batch.apply(SchedulerOutput(0, [], [new]))
        self.held[name] = self.done[name] = 0
        self.prompt_len[name] = num_prompt

    def batch(self, work: Sequence[tuple[str, int]], taps: Taps | None = None) -> tuple[list[ScheduledEntry], ForwardBatch]:
        """The next `count` tokens of each named sequence as one batch that wants the logits of every row."""
        entries = []
        for name, count in work:
            start, end = self.done[name], self.done[name] + count
            needed = max(0, -(-end // self.block_size) - self.held[name])
            self.held[name] += needed
            kind = TokenKind.PROMPT if start < self.prompt_len[name] else TokenKind.GENERATED
            assert kind is TokenKind.GENERATED or end <= self.prompt_len[name]
            blocks = tuple(itertools.islice(self.free, needed))
            entries.append(ScheduledEntry(name, start, count, kind, (blocks,) * self.num_groups, False))
            self.done[name] = end
        entries.sort(key=lambda e: e.kind is TokenKind.PROMPT)  # stable: generated rows first
        self.runner.input_batch.apply(SchedulerOutput(0, entries))
        batch = self.runner.input_batch.build(entries, self.runner.kv, taps)
        batch.logits_rows = np.arange(batch.num_rows, dtype=np.int32)
        batch.num_generated_logits = batch.num_generated
        return entries, batch

    def step(self, work: Sequence[tuple[str, int]], taps: Taps | None = None) -> dict[str, np.ndarray]:
        """Computes the next `count` tokens of each named sequence in one batch; their logits, float32 [count, V]."""
        entries, batch = self.batch(work, taps)
        ops = self.executor.ops
        ops.begin_step(batch.num_rows)
        hidden = self.runner.model.forward(ops.to_device(batch))
        logits = []
        for first in range(0, batch.num_rows, LOGITS_ROWS):
            last = min(first + LOGITS_ROWS, batch.num_rows)
            with ops.arena.scope():
                generated = min(max(batch.num_generated - first, 0), last - first)
                logits.append(ops.to_numpy(self.runner.model.logits(hidden[first:last], generated)).copy())
        flat = np.concatenate(logits)
        bounds = batch.query_start_loc.tolist()
        return {e.request_id: flat[a:b] for e, a, b in zip(entries, bounds, bounds[1:], strict=False)}


def all_logits(
    executor: LocalExecutor, tokens: Sequence[int], *, num_prompt: int | None = None, chunk: int = 512, taps: Taps | None = None
) -> np.ndarray:
    """float32 [T, V]: logits after every token of one sequence, prompt rows in chunks, generated rows one at a time."""
    sequences = Sequences(executor)
    sequences.add("s", tokens, num_prompt)
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    pieces = []
    while sequences.done["s"] < len(tokens):
        done = sequences.done["s"]
        count = min(chunk, num_prompt - done) if done < num_prompt else 1
        pieces.append(sequences.step([("s", count)], taps)["s"])
    return np.concatenate(pieces)
