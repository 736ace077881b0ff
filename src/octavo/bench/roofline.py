"""What an op should take on this machine: the larger of (bytes it must move / bandwidth) and (operations / peak).

The roofline model (Williams, Waterman & Patterson 2009), with the limits that were measured (limits.py). It knows nothing of
the cost of starting work, so a small op lies far above it. Bytes and operations are counted from shapes, the least that any
kernel could do: every weight, key and value read once, every result written once.
Pure functions. Not here: measuring limits, timing ops (kernels.py, breakdown.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from octavo.bench.limits import Limits

_F32 = 4  # bytes
#: Operations that an exponential is counted as.
_EXP = 10


class Stream(NamedTuple):
    """Bytes moved, and the size of the set they belong to, which decides where they come from."""

    size: float
    working_set: float


@dataclass(frozen=True, slots=True)
class Cost:
    streams: tuple[Stream, ...]
    operations: float
    #: Of quantised weights and activations of 8 or of 15 bits (docs/numerics.md), or of floats.
    kind: Literal["integer8", "integer15", "f32"] = "f32"

    @property
    def bytes(self) -> float:
        return sum(stream.size for stream in self.streams)


class Bound(NamedTuple):
    seconds: float
    by: Literal["memory", "compute"]


def bound(cost: Cost, limits: Limits, level: str, threads: int) -> Bound | None:
    """None where the level's peak was not measured."""
    peak = _peak(limits, level, cost.kind, threads)
    if peak is None:
        return None
    memory = sum(stream.size / limits.bandwidth(stream.working_set, threads) for stream in cost.streams)
    compute = cost.operations / peak
    return Bound(memory, "memory") if memory >= compute else Bound(compute, "compute")


def _peak(limits: Limits, level: str, kind: str, threads: int) -> float | None:
    speeds = limits.compute.get(level)
    if speeds is None or "f32" not in speeds:
        return None
    floats = speeds["f32"].of(threads)
    if kind == "f32":
        return floats
    # 15 bits are one integer of 16 or two of 8; what wider numbers or floats do faster, they would do
    whole = speeds["int16"].of(threads) if "int16" in speeds else 0.0
    small = speeds["int8"].of(threads) if "int8" in speeds else 0.0
    return max(floats, whole, small if kind == "integer8" else small / 2)


def linear(rows: int, generated: int, columns: int, inputs: int, weight_bytes: int, weights_in_turn: float) -> Cost:
    """`generated`: of the rows; `weights_in_turn`: bytes of all weights that are read before this one is read again."""
    activations = rows * (columns + inputs) * _F32
    streams = (Stream(weight_bytes, max(weights_in_turn, weight_bytes)), Stream(activations, activations))
    per_number = weight_bytes / (columns * inputs)
    kind: Literal["integer8", "integer15", "f32"] = "f32"
    if per_number < 1.75:  # no float takes so little, nor 8 bits as little as 4
        kind = "integer8" if per_number < 0.9 and generated == rows else "integer15"
    return Cost(streams, 2.0 * rows * columns * inputs, kind)


def attend(pairs: float, keys: float, heads: int, kv_heads: int, head_dim: int, kv_item: float, kv_in_turn: float, rows: int) -> Cost:
    """`pairs`: of a row and a key it sees; `keys`: tokens whose K and V are read; `kv_item`: bytes of one number in the pool."""
    kv = keys * 2 * kv_heads * head_dim * kv_item
    activations = 2 * rows * heads * head_dim * _F32
    streams = (Stream(kv, max(kv_in_turn, kv)), Stream(activations, activations))
    return Cost(streams, pairs * heads * (4.0 * head_dim + _EXP))


def rope_kv_write(rows: int, heads: int, kv_heads: int, head_dim: int, kv_item: float) -> Cost:
    moved = rows * head_dim * ((heads + 2 * kv_heads) * _F32 + heads * _F32 + 2 * kv_heads * kv_item)
    return Cost((Stream(moved, moved),), 3.0 * rows * head_dim * (heads + kv_heads))


def rms_norm(rows: int, columns: int) -> Cost:
    return _elementwise(2 * rows * columns, 4.0 * rows * columns)


def add_rms_norm(rows: int, columns: int) -> Cost:
    return _elementwise(4 * rows * columns, 5.0 * rows * columns)


def add(rows: int, columns: int) -> Cost:
    return _elementwise(3 * rows * columns, 1.0 * rows * columns)


def silu_mul(rows: int, columns: int) -> Cost:
    """`columns`: of the result."""
    return _elementwise(3 * rows * columns, (_EXP + 4.0) * rows * columns)


def copy_rows(rows: int, columns: int) -> Cost:
    """Rows taken from somewhere: take_rows, and the embedding, whose rows are at most as large as their float32."""
    return _elementwise(2 * rows * columns, 0.0)


def _elementwise(numbers: int, operations: float) -> Cost:
    return Cost((Stream(numbers * _F32, numbers * _F32),), operations)
