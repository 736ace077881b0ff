"""Which layer is the first to differ: both arms once more, with taps on one row.

The engine runs deterministically, so the same row of the matrix schedules the same steps again. Taps force the eager path: a
difference that is gone then lies in how steps are replayed.
Stateless but for the watch. Not here: what differs (comparison.py).
"""

from __future__ import annotations

import numpy as np

from octavo.engine.scheduler_output import SchedulerOutput
from octavo.ops.api import Taps
from octavo.verify.recorder import FloatArray, RowValues, Target

#: Where bits are not promised, a layer counts as different from this share of its largest value on.
ROUGH = 0.02


class TapWatch:
    """Keeps the layers' values of one row; `names` are what a run with a Comparison would call its requests (ignored here)."""

    def __init__(self, target: Target, names: frozenset[str]) -> None:
        self.target = target
        self.tap_names = names
        self.names: dict[str, int] = {}
        self.hits_allowed = False
        self.values: RowValues | None = None
        self._met = 0

    def tap(self, output: SchedulerOutput) -> tuple[Taps, RowValues] | None:
        row = self.target.row_in(output)
        if row is None or self.values is not None:
            return None
        self._met += 1
        if self._met <= self.target.occurrence:
            return None
        self.values = RowValues(row)
        return Taps(self.tap_names, self.values), self.values

    def logits(self, request_id: str, position: int, rows: FloatArray) -> None:
        return None

    def finish(self, request_id: str, choice: int, token_ids: list[int], count: int | None = None) -> None:
        return None

    def text(self, request_id: str, case: int, got: str, expected: str, what: str, ends: list[int]) -> None:
        return None


def tap_names(num_layers: int) -> list[str]:
    """In the order in which they are computed."""
    return ["embed", *(f"layers.{i}.{part}" for i in range(num_layers) for part in ("attn", "mlp"))]


def first_layer(expected: RowValues, got: RowValues, names: list[str], *, bitwise: bool) -> str | None:
    """The first tap whose value differs, or None: then only what comes behind the layers does."""
    for name in names:
        a, b = expected[name], got[name]
        if bitwise:
            differs = not np.array_equal(a.view(np.uint32), b.view(np.uint32))
        else:
            differs = float(np.abs(a - b).max()) > ROUGH * float(np.abs(a).max())
        if differs:
            return name
    return None
