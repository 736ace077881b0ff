"""Single ops of the native backend: op x shape x layout x rows x instruction-set level, beside what the machine allows.

Weights and KV are larger than the cache and used in turn, as decoding sees them: cold. A time is the median of several
batches of calls after a warm-up, and holds one call from Python each. Inputs are random.
Owner of the ops and weights it makes, one case at a time. Not here: limits (limits.py), bounds (roofline.py), whole steps (latency.py).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from octavo.bench import roofline
from octavo.bench.kernel_shapes import BLOCK_SIZE, Matrix, ModelShapes, one_sequence_each, random_packed
from octavo.bench.limits import Limits
from octavo.errors import ConfigError
from octavo.model_config import RopeConfig
from octavo.ops.api import KVDtype, KVSpec

METHOD = "median of batches of calls from Python, warmed; weights and KV larger than the cache, used in turn; bytes and operations by shape"
#: Rows up to here are generated ones, one of each sequence; more are the rows of one prompt.
MOST_GENERATED = 64
_BATCHES = 7
_BATCH_SECONDS = 0.002
_SLOW_CALL = 0.3
_MAX_COPIES = 2048
#: A set that no cache holds, where the size of the cache is not known; and the most that is made.
_COLD_BYTES, _MOST_COLD_BYTES = 128 << 20, 1 << 30
_KV_ITEM: dict[KVDtype, float] = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time. `calls` are used in turn: the same work on other memory."""

    op: str
    shape: str
    layout: str
    rows: int
    calls: Sequence[Callable[[], object]]
    cost: roofline.Cost


@dataclass(frozen=True, slots=True)
class Wanted:
    shapes: ModelShapes
    rows: Sequence[int]
    #: Tokens of the sequences that attention reads.
    context: int = 512
    kv_dtype: KVDtype = "bf16"


def measure(
    wanted: Wanted, levels: Sequence[str], limits: Limits, threads: int = 0, done: Callable[[], object] | None = None
) -> list[dict[str, Any]]:
    """One record a case, in the order of levels and cases. `done` is called after each of `count(wanted) * len(levels)`."""
    records = []
    for level in levels:
        ops = make_ops(max(*wanted.rows, 512, wanted.context), threads, level)
        for case in _cases(wanted, ops, cold_bytes(limits)):
            records.append({"level": level, **_record(case, ops, limits, level)})
            if done is not None:
                done()
    return records


def count(wanted: Wanted) -> int:
    """How many cases there are at one level."""
    return sum(len(_rows_of(matrix, wanted.rows)) for matrix in wanted.shapes.matrices) + len(wanted.rows) * (
        6 if wanted.shapes.config is not None else 0
    )


def make_ops(rows: int, threads: int, level: str) -> Any:
    """The native ops of one level. Raises ConfigError where there are none, or the level cannot run here."""
    try:
        from octavo.ops.cpu import CpuOps
    except ImportError as error:
        raise ConfigError(f"the native module is not usable here ({error}): reinstall it") from None
    return CpuOps(rows, threads, isa=level)


def cold_bytes(limits: Limits) -> int:
    """As much as must lie between two uses of a weight for it to come from memory again."""
    return min(_MOST_COLD_BYTES, max(_COLD_BYTES, 2 * limits.l3_bytes))


def _record(case: Case, ops: Any, limits: Limits, level: str) -> dict[str, Any]:
    seconds = seconds_of_call(case.calls, ops)
    least = roofline.bound(case.cost, limits, level, ops.describe()["threads"])
    return {
        "op": case.op,
        "shape": case.shape,
        "layout": case.layout,
        "rows": case.rows,
        "us": round(1e6 * seconds, 3),
        "gb_per_s": round(case.cost.bytes / seconds / 1e9, 3),
        "gop_per_s": round(case.cost.operations / seconds / 1e9, 3),
        "limit_us": None if least is None else round(1e6 * least.seconds, 4),
        "bound": None if least is None else least.by,
        "share": None if least is None else round(least.seconds / seconds, 4),
    }


def seconds_of_call(calls: Sequence[Callable[[], object]], ops: Any) -> float:
    """Median over batches of the mean time of a call; the calls are made in turn throughout."""
    turn = itertools.cycle(calls)

    def batch(size: int) -> float:
        begin = perf_counter()
        for _ in range(size):
            with ops.arena.scope():
                next(turn)()
        return (perf_counter() - begin) / size

    ops.begin_step(1)
    first = max(min(batch(1) for _ in range(3)), 1e-7)
    size = max(1, round(_BATCH_SECONDS / first))
    batch(size)
    return statistics.median(batch(size) for _ in range(3 if first > _SLOW_CALL else _BATCHES))


# -- cases -----------------------------------------------------------------------------------------------------------


def _cases(wanted: Wanted, ops: Any, cold: int) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for matrix in wanted.shapes.matrices:
        yield from _linear(matrix, _rows_of(matrix, wanted.rows), ops, rng, cold)
    if wanted.shapes.config is not None:
        for rows in wanted.rows:
            yield from _small(wanted, rows, ops, rng)
            yield from _attention(wanted, rows, ops, rng, cold)


def _rows_of(matrix: Matrix, rows: Sequence[int]) -> list[int]:
    """The output matrix is never given a whole prompt: only rows that draw a token."""
    return [r for r in rows if not matrix.is_head or r <= MOST_GENERATED]


def _linear(matrix: Matrix, rows: Sequence[int], ops: Any, rng: np.random.Generator, cold: int) -> Iterator[Case]:
    if not rows:
        return
    parts = [random_packed(rng, part) for part in matrix.parts]
    weights = [ops.pack_linear(parts)]
    copies = min(_MAX_COPIES, -(-cold // max(1, weights[0].nbytes)))
    weights += [ops.pack_linear(parts) for _ in range(copies - 1)]
    size = weights[0].nbytes
    for r in rows:
        x = rng.standard_normal((r, matrix.inputs), dtype=np.float32)
        generated = r if r <= MOST_GENERATED else 0
        calls = [lambda weight=weight, x=x, generated=generated: ops.linear(x, weight, generated) for weight in weights]
        cost = roofline.linear(r, generated, matrix.columns, matrix.inputs, size, size * len(weights))
        yield Case(f"linear {matrix.name}".strip(), f"{matrix.columns}x{matrix.inputs}", matrix.layouts, r, calls, cost)


def _small(wanted: Wanted, rows: int, ops: Any, rng: np.random.Generator) -> Iterator[Case]:
    config = wanted.shapes.config
    assert config is not None
    hidden, inner = config.hidden_size, config.intermediate_size
    x, y = (rng.standard_normal((rows, hidden), dtype=np.float32) for _ in range(2))
    gate_up = rng.standard_normal((rows, 2 * inner), dtype=np.float32)
    weight, index = ops.pack_vector(np.ones(hidden, np.float32)), np.arange(rows, dtype=np.int32)
    shape = f"{rows}x{hidden}"
    yield Case("rms_norm", shape, "f32", rows, [lambda: ops.rms_norm(x, weight, 1e-5)], roofline.rms_norm(rows, hidden))
    yield Case("add_", shape, "f32", rows, [lambda: ops.add_(x, y)], roofline.add(rows, hidden))
    yield Case("silu_mul", f"{rows}x{2 * inner}", "f32", rows, [lambda: ops.silu_mul(gate_up)], roofline.silu_mul(rows, inner))
    yield Case("take_rows", shape, "f32", rows, [lambda: ops.take_rows(x, index)], roofline.copy_rows(rows, hidden))


def _attention(wanted: Wanted, rows: int, ops: Any, rng: np.random.Generator, cold: int) -> Iterator[Case]:
    """Generated rows, each with a sequence of its own, or the last rows of one prompt; the layers of a pool are used in turn."""
    config = wanted.shapes.config
    assert config is not None
    heads, kv_heads, dim, item = config.num_heads, config.num_kv_heads, config.head_dim, _KV_ITEM[wanted.kv_dtype]
    sequences, each = (rows, 1) if rows <= MOST_GENERATED else (1, rows)
    length = max(wanted.context, each)
    blocks = sequences * -(-length // BLOCK_SIZE)
    layer_bytes = blocks * ops.kv_block_bytes(KVSpec(1, blocks, BLOCK_SIZE, kv_heads, dim, wanted.kv_dtype))
    layers = min(_MAX_COPIES, -(-cold // layer_bytes))
    kv = ops.alloc_kv(KVSpec(layers, blocks, BLOCK_SIZE, kv_heads, dim, wanted.kv_dtype))
    rope = ops.rope_table(RopeConfig(dim=dim), length)
    for layer in range(layers):  # written, or every page would be the one page of zeros
        for sequence in range(sequences):
            part = one_sequence_each([sequence], length, length, kv)
            ops.begin_step(length)
            ops.rope_kv_write(rng.standard_normal((length, (heads + 2 * kv_heads) * dim), dtype=np.float32), rope, layer, part, 0, heads)
    batch = one_sequence_each(list(range(sequences)), length, each, kv)
    qkv = rng.standard_normal((rows, (heads + 2 * kv_heads) * dim), dtype=np.float32)
    q = rng.standard_normal((rows, heads, dim), dtype=np.float32)
    shape = f"{heads}/{kv_heads} heads of {dim}"
    writes = [lambda layer=layer: ops.rope_kv_write(qkv, rope, layer, batch, 0, heads) for layer in range(layers)]
    yield Case("rope_kv_write", shape, wanted.kv_dtype, rows, writes, roofline.rope_kv_write(rows, heads, kv_heads, dim, item))
    reads = [lambda layer=layer: ops.attend(q, layer, batch, 0, dim**-0.5) for layer in range(layers)]
    pairs = sequences * (each * length - each * (each - 1) / 2)
    cost = roofline.attend(pairs, sequences * length, heads, kv_heads, dim, item, layers * layer_bytes, rows)
    yield Case("attend", f"{shape}, {length} keys", wanted.kv_dtype, rows, reads, cost)
