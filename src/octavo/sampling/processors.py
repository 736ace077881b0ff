"""What each sampling setting does to the logits of one row: pure functions, each stated as a definition.

Two stages (docs/sampling.md). *Edits* change single logits: logit_bias, penalties, bans and allowed_token_ids; a banned
token stays banned whatever is added to it, so bans may come last. *Filters* turn the edited logits into the tokens that
may be drawn and their weights: temperature, top_k, top_p, min_p, typical_p, each on the renormalised outcome of the one
before. Weights are exp((x - max) / temperature): never renormalised themselves, because every filter is written in
ratios, and with the maximum taken out first no temperature can overflow.

A row is handled alone and contiguous, so its bits cannot depend on the batch. Full sorts are avoided: a filter that
needs an order sorts the few largest candidates, and more only if those do not hold enough mass.
Not here: state of a request (state.py), random numbers (random.py). Nothing here modifies an argument unless it says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

_NEG_INF = np.float32(-np.inf)
_LARGEST = np.finfo(np.float32).max
#: Candidates sorted at first by a filter that needs an order; eight times more at each further try.
_FIRST_CANDIDATES = 256


# -- edits: in place on a copy of the row --------------------------------------------------------------------------------


def add_bias_(x: FloatArray, ids: IntArray, values: FloatArray) -> None:
    """x[id] += value, in place. ids int64 [B], each once; values float32 [B]."""
    x[ids] += values


def penalize_(x: FloatArray, ids: IntArray, counts: FloatArray, repetition: float, presence: float, frequency: float) -> None:
    """Penalties for tokens seen before, in place.

    ids int64 [D]: distinct tokens of prompt and output; counts float32 [D]: times in the output alone.
    repetition (Keskar et al. 2019, as transformers has it): a positive logit is divided by it, a negative one multiplied,
    for every token seen. Then OpenAI's definition, for tokens of the output: x -= counts * frequency + (counts > 0) * presence.
    """
    seen = x[ids]
    if repetition != 1.0:
        factor = np.float32(repetition)
        with np.errstate(over="ignore"):  # a factor below 1 may enlarge a huge logit past float32
            seen = np.minimum(np.where(seen < 0, seen * factor, seen / factor), _LARGEST)
    seen -= counts * np.float32(frequency) + (counts > 0) * np.float32(presence)
    x[ids] = seen


def restrict_(x: FloatArray, allowed: IntArray | None, banned: IntArray) -> FloatArray:
    """Logits of the tokens that may still be chosen; x float32 [V] is overwritten.

    allowed int64 [A] ascending, or None for the whole vocabulary; banned int64 [B] get -inf. Returns float32 [A], or x
    itself. Bans give way when they would leave nothing: allowed_token_ids is a promise about the output (often a format),
    min_tokens and bad_words are wishes. So with allowed = {eos} and min_tokens = 5 the answer is eos at once. When the
    model itself gives -inf to every token left, those count as equal.
    """
    left = x if allowed is None else x[allowed]
    if banned.size:
        saved = x[banned]
        x[banned] = _NEG_INF
        strict = x if allowed is None else x[allowed]
        if strict.max() > _NEG_INF:
            return strict
        x[banned] = saved
    return left if left.max() > _NEG_INF else np.zeros_like(left)


# -- filters -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of one request with `off` made explicit: top_k 0, top_p 1, min_p 0, typical_p 1."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> Filters:
        """From resolved params. top_k of 0, -1 or at least the vocabulary's size is off."""
        assert params.temperature is not None and params.top_k is not None and params.top_p is not None
        assert params.min_p is not None and params.typical_p is not None
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        return cls(float(params.temperature), top_k, float(params.top_p), float(params.min_p), float(params.typical_p))


def candidates(x: FloatArray, filters: Filters, best: int) -> tuple[IntArray | None, FloatArray]:
    """What may be drawn from logits x float32 [N] with maximum x[best] (finite): (indices ascending, or None for all of
    them; weights float32 proportional to the probabilities, the largest of all N being 1).

    At least one index survives: the most probable one, or with typical_p the most typical one.
    """
    z = scaled(x, filters.temperature, x[best])
    kept: IntArray | None = None
    if 0 < filters.top_k < z.size:
        kept = largest(z, filters.top_k)
        z = z[kept]
    weights = np.exp(z)
    if filters.top_p < 1.0:
        kept, z, weights = _narrow(kept, z, weights, top_p(z, weights, filters.top_p))
    if filters.min_p > 0.0:
        kept, z, weights = _narrow(kept, z, weights, min_p(weights, filters.min_p))
    if filters.typical_p < 1.0:
        kept, z, weights = _narrow(kept, z, weights, typical_p(z, weights, filters.typical_p))
    return kept, weights


def _narrow(kept: IntArray | None, z: FloatArray, weights: FloatArray, chosen: IntArray) -> tuple[IntArray, FloatArray, FloatArray]:
    return (chosen if kept is None else kept[chosen]), z[chosen], weights[chosen]


def scaled(x: FloatArray, temperature: float, maximum: np.float32) -> FloatArray:
    """(x - maximum) / temperature: at most 0, so exp of it is in [0, 1] at any temperature."""
    with np.errstate(over="ignore"):  # the farthest tokens may reach -inf, which is weight 0
        z = x - maximum
        if temperature != 1.0:
            z /= np.float32(temperature)
    return z


def top_p(z: FloatArray, weights: FloatArray, p: float) -> IntArray:
    """Nucleus sampling (Holtzman et al. 2020): the fewest most probable tokens that hold a share p of the mass.
    int64, ascending; equal logits count in order of index."""
    return _holding(z, weights, p)


def min_p(weights: FloatArray, p: float) -> IntArray:
    """Tokens at least p times as probable as the most probable one (Nguyen et al. 2024). int64, ascending."""
    return np.flatnonzero(weights >= np.float32(p) * weights.max())


def typical_p(z: FloatArray, weights: FloatArray, p: float) -> IntArray:
    """Locally typical sampling (Meister et al. 2022): the fewest tokens that hold a share p of the mass, those first
    whose information -log(prob) is nearest to the entropy. int64, ascending; ties in order of index.

    With log(prob) = z - log(sum of weights) the distance is |z - weighted mean of z|.
    """
    finite = np.maximum(z, -_LARGEST)  # where the weight is 0, z may be -inf, and their product no number
    mean = np.sum(weights * finite, dtype=np.float64) / weights.sum(dtype=np.float64)
    return _holding(-np.abs(z - np.float32(mean)), weights, p)


def _holding(score: FloatArray, weights: FloatArray, share: float) -> IntArray:
    """Ascending indices of the shortest list, in order of (score descending, index ascending), whose weights sum to at
    least `share` of all weights. Sums in float64."""
    goal = share * weights.sum(dtype=np.float64)
    count = min(_FIRST_CANDIDATES, score.size)
    while True:
        order = in_order(score, largest(score, count))
        held = np.cumsum(weights[order], dtype=np.float64)
        if held[-1] >= goal or count == score.size:
            break
        count = min(count * 8, score.size)
    return np.sort(order[: int(np.searchsorted(held, goal)) + 1])


def largest(x: FloatArray, count: int) -> IntArray:
    """Ascending indices of the `count` largest values of x [N], no NaN; of equal values the lower index goes first.
    A selection, not a sort: O(N)."""
    if count >= x.size:
        return np.arange(x.size)
    if count == 0:
        return np.empty(0, dtype=np.int64)
    threshold = np.partition(x, x.size - count)[x.size - count]
    found = np.flatnonzero(x >= threshold)
    surplus = found.size - count
    if surplus:
        equal = np.flatnonzero(x[found] == threshold)
        found = np.delete(found, equal[equal.size - surplus :])
    return found


def in_order(x: FloatArray, indices: IntArray) -> IntArray:
    """`indices` (below 2**32) by value of x float32 descending, equal values (0.0 and -0.0 too) by index.

    One sort of integers, value above index, which NumPy does several times faster than a stable argsort: flipping the
    lower bits of negative floats makes their order as integers that of their values.
    """
    bits = (x[indices] + np.float32(0.0)).view(np.int32)  # -0.0 + 0.0 is 0.0
    descending = ~(bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)
    keys = (descending << 32) | indices
    keys.sort()
    return keys & 0xFFFFFFFF
