"""NativeSampler: the sampler on the kernels of a backend that has some, all rows of a step in one call without the GIL.

Its definition is sampler.py, row by row in NumPy; tests/ops/test_native_sampling.py holds the two together. A row's token
and logprobs depend, to the bit, on its logits, its state and the instruction-set level: not on the other rows, their
number, or the threads (docs/sampling.md).
Owner of the count of its rows. Not here: arithmetic (native/src/ops_sampling.cpp), which sampler is used (`make_sampler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.api import Ops, SamplingKernels
from octavo.outputs import Logprob, PositionLogprobs
from octavo.sampling.logprobs import checked_targets
from octavo.sampling.sampler import FloatArray, NumpySampler, Sampler, checked_logits
from octavo.sampling.state import SamplingState

_SEED_MASK = 0xFFFFFFFFFFFFFFFF


def make_sampler(ops: Ops) -> Sampler:
    """The sampler that goes with a backend: native where it has kernels for it, else the NumPy specification."""
    return NumpySampler() if ops.sampling_kernels is None else NativeSampler(ops.sampling_kernels)


class NativeSampler:
    """See `Sampler` for the contract."""

    name = "native"

    def __init__(self, kernels: SamplingKernels) -> None:
        self._kernels = kernels
        self.rows = 0

    def sample(self, logits: FloatArray, states: Sequence[SamplingState]) -> tuple[npt.NDArray[np.int32], list[PositionLogprobs | None]]:
        logits = _row_contiguous(checked_logits(logits, states))
        rows = len(states)
        reals = np.array([_reals(s) for s in states], dtype=np.float64).reshape(rows, 7)
        wholes = np.array([_wholes(s) for s in states], dtype=np.int64).reshape(rows, 4)
        keys = np.array([(s.seed & _SEED_MASK, s.choice, s.position) for s in states], dtype=np.uint64).reshape(rows, 3)
        asked = [s.params.logprobs for s in states if s.params.logprobs is not None]
        tokens, report = np.empty(rows, dtype=np.int32), _Report(rows, max(asked, default=-1) + 1)
        self._kernels.sample(logits, reals, wholes, keys, [_edits(s) for s in states], tokens, *report.arrays)
        self.rows += rows
        return tokens, report.entries() if asked else [None] * rows

    def prompt_logprobs(self, logits: FloatArray, target_ids: Sequence[int] | npt.NDArray[np.integer], k: int) -> list[PositionLogprobs]:
        targets = np.array(checked_targets(logits, target_ids), dtype=np.int64)
        report = _Report(len(targets), k + 1)
        self._kernels.logprobs(_row_contiguous(logits), targets, k, *report.arrays)
        return [entry or {} for entry in report.entries()]


class _Report:
    """Room for the logprobs of R rows, and the entries made of it."""

    def __init__(self, rows: int, width: int) -> None:
        self.arrays = (
            np.empty((rows, width), dtype=np.int32),
            np.empty((rows, width), dtype=np.float64),
            np.empty((rows, width), dtype=np.int64),
            np.zeros(rows, dtype=np.int32),
        )

    def entries(self) -> list[PositionLogprobs | None]:
        ids, values, ranks, counts = (array.tolist() for array in self.arrays)
        return [
            {i: Logprob(v, r) for i, v, r in zip(ids[row][:count], values[row][:count], ranks[row][:count], strict=True)} if count else None
            for row, count in enumerate(counts)
        ]


def _reals(state: SamplingState) -> tuple[float, ...]:
    """The columns of `reals`, in the order of the native enum Real."""
    filters, params = state.filters, state.params
    return (
        filters.temperature,
        filters.top_p,
        filters.min_p,
        filters.typical_p,
        state.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def _wholes(state: SamplingState) -> tuple[int, ...]:
    """The columns of `wholes`, in the order of the native enum Whole. logprobs -1: none."""
    params = state.params
    logprobs = -1 if params.logprobs is None else params.logprobs
    return (state.filters.top_k, int(state.greedy), logprobs, int(params.logprobs_mode == "processed"))


def _edits(state: SamplingState) -> tuple[Any, ...] | None:
    if not state.edits_logits:
        return None
    seen_ids, seen_counts = (None, None) if state.counts is None else (state.counts.ids, state.counts.counts)
    return (state.bias_ids, state.bias_values, seen_ids, seen_counts, state.banned_ids(), state.allowed_ids)


def _row_contiguous(logits: FloatArray) -> FloatArray:
    """Rows may be any distance apart, the columns of one may not."""
    return logits if logits.shape[1] < 2 or logits.strides[1] == logits.itemsize else np.ascontiguousarray(logits)
