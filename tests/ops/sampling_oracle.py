"""The definition of a draw in float64, and what a draw in float32 may differ in.

Edits, z = (x - max) / temperature in float32, their order and their ties are part of the definition and exact
(docs/sampling.md). What is left to rounding is exp and sums of weights. So the rule of the tests: with every threshold
that is compared with a sum or a weight moved by at most EPSILON (relative), the token drawn must be one whose cumulative
interval in float64, widened by EPSILON of the mass, contains the random number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from octavo.sampling.random import uniforms
from octavo.sampling.sampler import NO_TOKEN, edit
from octavo.sampling.state import SamplingState
from octavo.sampling_params import SamplingParams

#: Two roundings of exp and those of a block of 256 float32 weights.
EPSILON = 2e-6
LARGEST = float(np.finfo(np.float32).max)


def state_of(vocab: int, *, prompt=(), output=(), stop=(), bad=(), seed=0, choice=0, **fields) -> SamplingState:
    params = SamplingParams(**fields).resolve({})
    return SamplingState(params, seed, choice, list(prompt), list(output), frozenset(stop), tuple(bad), vocab)


class Draw:
    """One row and its state, looked at in float64."""

    def __init__(self, row: np.ndarray, state: SamplingState) -> None:
        self.state, self.row = state, row
        self.spoilt = not np.isfinite(row.max()) or bool(np.isnan(row).any())
        if self.spoilt:
            return
        x = edit(row, state)
        self.ids = np.arange(row.size) if state.allowed_ids is None else state.allowed_ids
        with np.errstate(over="ignore"):
            self.z = (x - x.max()) / np.float32(state.filters.temperature) if not state.greedy else x
        self.random = float(uniforms([state.seed], [state.choice], [state.position])[0])

    def accepts(self, token: int) -> bool:
        if self.spoilt:
            return token == NO_TOKEN
        if self.state.greedy:
            return token == int(self.ids[int(np.flatnonzero(self.z == self.z.max())[0])])
        return any(self._contains(kept, token) for kept in self.variants())

    def _contains(self, kept: np.ndarray, token: int) -> bool:
        place = np.flatnonzero(self.ids[kept] == token)
        if not place.size:
            return False
        ends = np.cumsum(self.weights(kept))
        start = ends[place[0] - 1] if place[0] else 0.0
        return start - EPSILON * ends[-1] <= self.random * ends[-1] <= ends[place[0]] + EPSILON * ends[-1]

    def weights(self, kept: np.ndarray) -> np.ndarray:
        return np.exp(self.z[kept].astype(np.float64))

    def variants(self) -> Iterator[np.ndarray]:
        """Kept places, ascending, for every way the thresholds may fall; the unmoved ones first."""
        f, moves = self.state.filters, (0.0, -EPSILON, EPSILON)
        ways = [moves if on else (0.0,) for on in (f.top_p < 1, f.min_p > 0, f.typical_p < 1, f.typical_p < 1)]
        for top, least, share, mean in itertools.product(*ways):
            yield self._kept(top, least, share, mean)

    def _kept(self, top: float, least: float, share: float, mean: float) -> np.ndarray:
        f, kept = self.state.filters, np.arange(self.z.size)
        if 0 < f.top_k < kept.size:
            kept = np.sort(np.lexsort((kept, -self.z))[: f.top_k])
        if f.top_p < 1:
            kept = self._prefix(kept, -self.z[kept], f.top_p, top)
        if f.min_p > 0:
            kept = kept[self.weights(kept) >= float(np.float32(f.min_p)) * (1 + least)]
        if f.typical_p < 1:
            weights, z = self.weights(kept), np.maximum(self.z[kept].astype(np.float64), -LARGEST)
            middle = np.float32((weights * z).sum() / weights.sum())
            middle += np.float32(mean) * (1 + abs(middle))
            kept = self._prefix(kept, np.abs(self.z[kept] - middle), f.typical_p, share)
        return kept

    def _prefix(self, kept: np.ndarray, badness: np.ndarray, share: float, move: float) -> np.ndarray:
        """The fewest, in order of (badness, place), that hold the share, moved by `move` of the mass."""
        order = kept[np.lexsort((kept, badness))]
        held = np.cumsum(self.weights(order))
        return np.sort(order[: int(np.searchsorted(held, (share + move) * held[-1])) + 1])


def raw_matches(row: np.ndarray, entry: dict, token: int, k: int) -> bool:
    """The chosen token, then the k largest logits with the lower id first among equals; values within 1e-5 of float64."""
    exact = row.astype(np.float64)
    base = exact.max() + math.log(np.exp(exact - exact.max()).sum())
    order = np.lexsort((np.arange(row.size), -row))
    ranks = {int(i): rank for rank, i in enumerate(order.tolist(), start=1)}
    wanted = list(dict.fromkeys([token, *order[:k].tolist()]))
    return list(entry) == wanted and all(
        entry[i].rank == ranks[i] and _near(entry[i].logprob, max(float(exact[i] - base), -9999.0)) for i in wanted
    )


def processed_matches(draw: Draw, entry: dict, token: int, k: int) -> bool:
    """The same of what could be drawn, in order of z, for one of the ways the thresholds may fall."""
    if draw.state.greedy:
        return [(i, e.logprob, e.rank) for i, e in entry.items()] == [(token, 0.0, 1)]
    for kept in draw.variants():
        z, ids = draw.z[kept], draw.ids[kept]
        order = np.lexsort((np.arange(z.size), -z))
        ranks = {int(ids[i]): rank for rank, i in enumerate(order.tolist(), start=1)}
        places = {int(ids[i]): i for i in order.tolist()}
        base = math.log(draw.weights(kept).sum())
        wanted = list(dict.fromkeys([token, *(int(ids[i]) for i in order[:k] if z[i] > -103.972)]))
        if list(entry) == wanted and all(entry[i].rank == ranks[i] and _near(entry[i].logprob, float(z[places[i]]) - base) for i in wanted):
            return True
    return False


def _near(value: float, expected: float) -> bool:
    return abs(value - expected) <= 1e-5
