"""What is reported about a token's probability: natural logarithms, ranks, the most probable alternatives.

Raw (the default): log-softmax of the model's own logits, whatever the sampling settings, so that values can be compared
between calls. Processed: logarithm of the probability with which the token was really drawn, after every edit and
filter; a greedy request draws with certainty, so its token has 0.0. This is the one place where the two are made.
An entry is a dict in a fixed order: the chosen token, then the most probable ones; k or k + 1 entries, fewer when the
processed distribution holds fewer tokens. JSON has no infinity: a probability of 0 is reported as -9999.0.
Not here: text of tokens (the engine's output processor fills it in), sampling itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.outputs import Logprob, PositionLogprobs
from octavo.sampling.processors import in_order, largest

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

#: Reported for a probability of 0 (OpenAI's word for "very unlikely").
LOGPROB_FLOOR = -9999.0


def raw_logprobs(row: FloatArray, token_id: int, k: int) -> PositionLogprobs:
    """The chosen token and the k most probable ones by log-softmax of `row` float32 [V], free of NaN and +inf.

    exp in float32 after subtracting the maximum, its sum in float64. rank is 1 for the most probable token; of equal
    logits the lower id ranks first.
    """
    maximum = row.max()
    with np.errstate(over="ignore"):
        total = math.log(np.exp(row - maximum).sum(dtype=np.float64))
    base = float(maximum) + total
    top = in_order(row, largest(row, k)).tolist()
    rank = top.index(token_id) + 1 if token_id in top else _rank(row, token_id)
    found = {token_id: Logprob(_clamped(float(row[token_id]) - base), rank)}
    for place, other in enumerate(top, start=1):
        if other != token_id:
            found[other] = Logprob(_clamped(float(row[other]) - base), place)
    return found


def processed_logprobs(ids: IntArray | None, weights: FloatArray, token_id: int, k: int) -> PositionLogprobs:
    """The same from the tokens that could be drawn: ids int64 [N] ascending (None: 0 .. N-1) and weights float32 [N]
    proportional to their probabilities. Tokens that could not be drawn are left out."""
    total = float(weights.sum(dtype=np.float64))
    chosen = token_id if ids is None else int(np.searchsorted(ids, token_id))
    found = {token_id: Logprob(_log_share(weights[chosen], total), _rank(weights, chosen))}
    for place, index in enumerate(in_order(weights, largest(weights, k)).tolist(), start=1):
        other = index if ids is None else int(ids[index])
        if other != token_id and weights[index] > 0:
            found[other] = Logprob(_log_share(weights[index], total), place)
    return found


def prompt_logprobs(logits: FloatArray, target_ids: Sequence[int] | npt.NDArray[np.integer], k: int) -> list[PositionLogprobs]:
    """Raw logprobs of given tokens: entry m tells of target_ids[m] under row m of logits float32 [M, V].

    The logits must be free of NaN and +inf (the caller ends the request otherwise); prompt logprobs are always raw.
    Raises ValueError for shapes or ids that do not fit, before any work.
    """
    targets = checked_targets(logits, target_ids)
    return [raw_logprobs(row, token_id, k) for row, token_id in zip(logits, targets, strict=True)]


def checked_targets(logits: FloatArray, target_ids: Sequence[int] | npt.NDArray[np.integer]) -> list[int]:
    """The target ids of logits [M, V]: M of them, each below V. ValueError otherwise."""
    rows, width = logits.shape
    targets = [int(token_id) for token_id in target_ids]
    if len(targets) != rows or not all(0 <= token_id < width for token_id in targets):
        raise ValueError(f"{len(targets)} target ids do not fit logits {logits.shape}")
    return targets


def _rank(x: FloatArray, index: int) -> int:
    """1 + how many values come before x[index] in order of (value descending, index)."""
    value = x[index]
    return 1 + int(np.count_nonzero(x > value)) + int(np.count_nonzero(x[:index] == value))


def _log_share(weight: np.float32, total: float) -> float:
    return math.log(float(weight)) - math.log(total) if weight > 0 else LOGPROB_FLOOR


def _clamped(value: float) -> float:
    """Never -inf and never NaN: JSON can hold neither."""
    return max(value, LOGPROB_FLOOR) if value == value else LOGPROB_FLOOR
