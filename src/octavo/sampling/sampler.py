"""Draws one token for each row of logits: the `Sampler` protocol, and its specification in NumPy.

Each row is handled alone: its outcome is a pure function of its own logits, its state and its own random number, bit for
bit the same in any batch. Only the random numbers of all rows are made in one call.
Owner of nothing: the caller keeps the states and calls `SamplingState.append` with the token drawn.
Not here: what each setting does (processors.py), what is reported (logprobs.py), the native sampler (native.py).

Cost of a row of V logits: greedy without edits is one argmax and copies nothing; an edited row is copied once; a draw
without top_k, top_p or typical_p is four passes over the row and no sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.outputs import PositionLogprobs
from octavo.sampling import processors
from octavo.sampling.logprobs import processed_logprobs, prompt_logprobs, raw_logprobs
from octavo.sampling.random import uniforms
from octavo.sampling.state import SamplingState

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

#: Stands for the token of a row whose logits hold NaN or +inf, or are all -inf: the caller ends that request.
NO_TOKEN = -1
_ONE = np.ones(1, dtype=np.float32)
_ONE.setflags(write=False)
#: Weights are summed in blocks of this many before the search, so that the draw makes no second array of V sums.
_BLOCK = 256


class Sampler(Protocol):
    """Draws and reports for one model runner."""

    #: "numpy" or "native".
    name: str
    #: Rows sampled so far, those without a token too.
    rows: int

    def sample(self, logits: FloatArray, states: Sequence[SamplingState]) -> tuple[npt.NDArray[np.int32], list[PositionLogprobs | None]]:
        """As the function `sample` below, which is the definition."""
        ...

    def prompt_logprobs(self, logits: FloatArray, target_ids: Sequence[int] | npt.NDArray[np.integer], k: int) -> list[PositionLogprobs]:
        """As `logprobs.prompt_logprobs`."""
        ...


class NumpySampler:
    """The specification as a `Sampler`, for the backends that have no kernels for it."""

    name = "numpy"

    def __init__(self) -> None:
        self.rows = 0

    def sample(self, logits: FloatArray, states: Sequence[SamplingState]) -> tuple[npt.NDArray[np.int32], list[PositionLogprobs | None]]:
        result = sample(logits, states)
        self.rows += len(states)
        return result

    def prompt_logprobs(self, logits: FloatArray, target_ids: Sequence[int] | npt.NDArray[np.integer], k: int) -> list[PositionLogprobs]:
        return prompt_logprobs(logits, target_ids, k)


def checked_logits(logits: FloatArray, states: Sequence[SamplingState]) -> FloatArray:
    """float32 [R, V]; ValueError when the shape does not fit the states."""
    logits = np.asarray(logits, dtype=np.float32)  # half-precision logits would overflow in the filters
    rows, width = logits.shape
    if rows != len(states) or any(state.vocab_size != width for state in states):
        raise ValueError(f"logits {logits.shape} do not fit {len(states)} states of vocabulary {[s.vocab_size for s in states][:1]}")
    return logits


def sample(logits: FloatArray, states: Sequence[SamplingState]) -> tuple[npt.NDArray[np.int32], list[PositionLogprobs | None]]:
    """One token for each row.

    logits float32 [R, V] (rows may be strided; never modified), states: R of them, of vocabulary V, each ahead of the
    token to draw. Returns token ids int32 [R], and for each row its logprobs or None if the request asked for none.
    A row the model spoilt (NaN, +inf or nothing but -inf) gives NO_TOKEN and None, and its neighbours go on.
    Raises ValueError when shapes do not fit the states.
    """
    logits = checked_logits(logits, states)
    token_ids = np.empty(len(states), dtype=np.int32)
    logprobs: list[PositionLogprobs | None] = [None] * len(states)
    randoms = _randoms(states)
    for i, state in enumerate(states):
        row = logits[i]
        best = int(row.argmax())  # argmax counts NaN as the largest, so this one look finds every spoilt row
        if not np.isfinite(row[best]):
            token_ids[i] = NO_TOKEN
            continue
        token, ids, weights = _draw_row(row, best, state, randoms[i])
        token_ids[i] = token
        if state.params.logprobs is not None:
            if state.params.logprobs_mode == "raw":
                logprobs[i] = raw_logprobs(row, token, state.params.logprobs)
            else:
                logprobs[i] = processed_logprobs(ids, weights, token, state.params.logprobs)
    return token_ids, logprobs


def _randoms(states: Sequence[SamplingState]) -> list[float]:
    """A number in [0, 1) for each state; greedy ones get 0 and cost nothing."""
    drawing = [i for i, state in enumerate(states) if not state.greedy]
    numbers = [0.0] * len(states)
    if drawing:
        chosen = [states[i] for i in drawing]
        values = uniforms([s.seed for s in chosen], [s.choice for s in chosen], [s.position for s in chosen])
        for i, value in zip(drawing, values.tolist(), strict=True):
            numbers[i] = value
    return numbers


def _draw_row(row: FloatArray, best: int, state: SamplingState, random: float) -> tuple[int, IntArray | None, FloatArray]:
    """(token, ids that could be drawn ascending or None for all, their weights)."""
    ids = state.allowed_ids
    if state.edits_logits:
        row = edit(row, state)
        best = int(row.argmax())
    if state.greedy:
        token = best if ids is None else int(ids[best])
        return token, np.array([token]), _ONE
    kept, weights = processors.candidates(row, state.filters, best)
    if ids is None:
        ids = kept
    elif kept is not None:
        ids = ids[kept]
    index = draw(weights, random)
    return (index if ids is None else int(ids[index])), ids, weights


def edit(row: FloatArray, state: SamplingState) -> FloatArray:
    """A row [V] after bias, penalties and bans: float32 [A] of state.allowed_ids, or [V] when all are allowed."""
    x = np.array(row, dtype=np.float32)
    if state.bias_ids.size:
        processors.add_bias_(x, state.bias_ids, state.bias_values)
    if state.counts is not None and state.counts.ids.size:
        params = state.params
        processors.penalize_(
            x, state.counts.ids, state.counts.counts, state.repetition_penalty, params.presence_penalty, params.frequency_penalty
        )
    return processors.restrict_(x, state.allowed_ids, state.banned_ids())


def draw(weights: FloatArray, random: float) -> int:
    """Index drawn by inverting the cumulative sum of weights float32 [N] (in order of index, which is order of token id)
    at `random` in [0, 1). An index of weight 0 is never drawn; at least one weight is positive.

    The sum is taken in two levels, whole blocks and then inside one block, always of the same size: the bits depend on
    the weights alone.
    """
    size = weights.size
    whole = size - size % _BLOCK
    sums = np.add.reduce(weights[:whole].reshape(-1, _BLOCK), axis=1, dtype=np.float32) if whole else _ONE[:0]
    if whole < size:
        sums = np.append(sums, np.add.reduce(weights[whole:], dtype=np.float32))
    ends = np.cumsum(sums, dtype=np.float64)
    goal = random * ends[-1]
    block = min(int(np.searchsorted(ends, goal, side="right")), ends.size - 1)
    if sums[block] == 0:  # only when rounding took goal up to the total
        block = int(np.flatnonzero(sums)[-1])
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    goal -= ends[block - 1] if block else 0.0
    index = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), goal, side="right"))
    if index == inside.size:  # the two ways of summing the block differ by a rounding
        index = int(np.flatnonzero(inside)[-1])
    return block * _BLOCK + index
