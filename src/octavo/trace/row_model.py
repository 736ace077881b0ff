"""RowModel: what a step costs as a linear function of its rows, fitted from the steps of a trace.

    seconds = a + b * generated rows + c * prompt rows + d * what generated rows attend to + e * what prompt rows attend to

with no coefficient below zero, least squares of the relative error. It divides the time of a shared step among its requests, and
prices steps that did not happen. Plain data. Not here: the division itself (explain.py), other schedules (counterfactual.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from octavo.engine.events import EntryEvent
from octavo.engine.scheduler_output import TokenKind
from octavo.trace.record import Trace, seconds

Vector = tuple[float, ...]
#: Steps whose time is further from the first fit than this factor are left out of the second: a machine has other things to do.
OUTLIER = 2.0
#: No step is shorter; one that says so tells nothing, and its relative error would overflow.
LEAST = 1e-9


class Rows(NamedTuple):
    """Tokens [start, start + count) of one request."""

    start: int
    tokens: int
    kind: TokenKind


def rows(entry: EntryEvent) -> Rows:
    return Rows(entry.start, entry.num_tokens, entry.kind)


def features(entries: Iterable[Rows]) -> Vector:
    """(1, generated rows, prompt rows, tokens attended to by each in thousands)."""
    count, context = [0.0, 0.0], [0.0, 0.0]
    for start, number, kind in entries:
        place = 0 if kind is TokenKind.GENERATED else 1
        count[place] += number
        context[place] += (number * start + number * (number + 1) / 2) / 1000
    return (1.0, *count, *context)


@dataclass(frozen=True, slots=True)
class RowModel:
    coefficients: Vector
    #: Different numbers of generated rows among the steps it was fitted to: with one alone, what a row costs beside others is a guess.
    shapes: int

    def seconds(self, entries: Iterable[Rows]) -> float:
        return sum(a * x for a, x in zip(self.coefficients, features(entries), strict=True))

    def share(self, own: Sequence[Rows], everything: Sequence[Rows]) -> float:
        """The time that `own` rows alone would take, as a share of that of all rows of a step: 0 to 1."""
        whole = self.seconds(everything)
        if len(own) == len(everything):
            return 1.0
        # nothing known of the costs: by the number of rows
        return self.seconds(own) / whole if whole > 0 else sum(row.tokens for row in own) / sum(row.tokens for row in everything)


def fit(trace: Trace) -> RowModel:
    """Of all steps that computed something; those that were not replayed, which cost more, only where no other has prompt rows."""
    steps = [event for event in [*trace.calibration, *trace.steps] if event.entries and seconds(event) > LEAST]
    usual = [event for event in steps if event.replayed]
    if not any(entry.kind is TokenKind.PROMPT for event in usual for entry in event.entries):
        usual = steps
    points = [(features(map(rows, event.entries)), seconds(event)) for event in usual]
    found = _least(points)
    near = [point for point in points if 1 / OUTLIER < _value(found, point[0]) / point[1] < OUTLIER]
    if len(near) < len(points) and len(near) > len(points) // 2:
        found = _least(near)
    return RowModel(found, len({x[1] for x, _ in points if x[1]}))


def _value(coefficients: Vector, x: Vector) -> float:
    return sum(a * b for a, b in zip(coefficients, x, strict=True))


def _least(points: list[tuple[Vector, float]]) -> Vector:
    """Non-negative least squares of the relative error: every set of coefficients is solved for, the best that has none below
    zero is taken; of sets that fit as well the smallest."""
    size = len(points[0][0]) if points else 5
    scaled = [tuple(value / y for value in x) for x, y in points]
    gram = [[sum(x[i] * x[j] for x in scaled) for j in range(size)] for i in range(size)]
    right = [sum(x[i] for x in scaled) for i in range(size)]
    best, least = tuple([0.0] * size), float(len(points))
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            solution = _solve([[gram[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen])
            if solution is None or min(solution) < 0:
                continue
            found = [0.0] * size
            for place, value in zip(chosen, solution, strict=True):
                found[place] = value
            error = sum((_value(tuple(found), x) - 1.0) ** 2 for x in scaled)
            if error < least - 1e-9 * len(points):
                best, least = tuple(found), error
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with pivots; None where the rows depend on each other."""
    size = len(right)
    scale = [matrix[i][i] ** 0.5 for i in range(size)]
    if min(scale) <= 0:
        return None
    work = [[matrix[i][j] / scale[i] / scale[j] for j in range(size)] + [right[i] / scale[i]] for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(work[row][column]))
        if abs(work[pivot][column]) < 1e-10:
            return None
        work[column], work[pivot] = work[pivot], work[column]
        for row in range(size):
            if row != column and (factor := work[row][column] / work[column][column]):
                work[row] = [a - factor * b for a, b in zip(work[row], work[column], strict=True)]
    return [work[i][size] / work[i][i] / scale[i] for i in range(size)]
