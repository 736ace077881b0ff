"""The op test matrix: every op x backend x dtype or layout x shape, against float64 computed in op_oracle.py.

`python -m tests.ops.test_matrix --perf [backend ...]` times the same ops instead (a look, not a test).
A backend that declines a case is skipped with its own reasons; test_supports_real_models says what none may decline.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from octavo.model_config import RopeConfig
from octavo.ops import layout
from octavo.ops.api import KVSpec, OpNeeds, PackedTensor
from octavo.ops.needs import OP_NAMES
from tests.ops import op_oracle as oracle
from tests.ops.op_oracle import Segment, make_batch, random_packed

CAPACITY_ROWS = 64

#: Largest error allowed, as a fraction of a natural scale: the result (rms_norm, silu_mul), |x| @ |W| + |bias| (linear),
#: |x| (rope), the largest |v| (attend). float32 everywhere but for the native linear over quantised weights, whose
#: activations are integers of 15 bits, or of 8 where generated rows meet 4-bit weights, per block of 32: plus "step" times
#: half a step of each block times |W|. Prompt rows of level amx have both operands rounded to bfloat16 where weights are quantised
#: or bfloat16: "bf16" times the roundings, 2^-8 of each operand.
TOLERANCE: dict[str, dict[str, float]] = {
    "reference": {"rms_norm": 2e-6, "silu_mul": 2e-6, "linear": 2e-6, "rope": 1e-6, "attend": 1e-5},
    "torch": {"rms_norm": 2e-6, "silu_mul": 2e-6, "linear": 2e-6, "rope": 1e-6, "attend": 1e-5},
    "cpu": {"rms_norm": 2e-6, "silu_mul": 2e-6, "linear": 2e-6, "rope": 1e-6, "attend": 1e-5, "step": 1.0, "bf16": 1.0},
}


@dataclass(frozen=True)
class Backend:
    name: str
    build: Callable[[], Any]
    isa: str = ""

    def array(self, values: np.ndarray) -> Any:
        """`values`, strides kept, as an array of the backend."""
        if self.name != "torch":
            return values
        import torch

        return torch.from_numpy(values)


def _cpu(isa: str | None) -> Any:
    return importlib.import_module("octavo.ops.cpu").CpuOps(CAPACITY_ROWS, threads=2, isa=isa)


def _reference() -> Any:
    from octavo.ops.reference import ReferenceOps

    return ReferenceOps(CAPACITY_ROWS)


def _torch() -> Any:
    from octavo.ops.torch import TorchOps

    return TorchOps(CAPACITY_ROWS)


def backends() -> list[Any]:
    """One pytest parameter each; those that cannot run here carry the reason."""
    found = [pytest.param(Backend("reference", _reference), id="reference")]
    missing = [] if importlib.util.find_spec("torch") else [pytest.mark.skip(reason="the torch extra is not installed")]
    found.append(pytest.param(Backend("torch", _torch), id="torch", marks=missing))
    try:
        levels = importlib.import_module("octavo._native").isa_levels()
    except ImportError as error:
        skip = pytest.mark.skip(reason=f"no native module: {error}")
        return [*found, pytest.param(Backend("cpu", lambda: _cpu(None)), id="cpu", marks=skip)]
    return [*found, *(pytest.param(Backend("cpu", lambda level=level: _cpu(level), level), id=f"cpu-{level}") for level in levels)]


every_backend = pytest.mark.parametrize("backend", backends())
ROWS = (0, 1, 2, 5, 17, 40)


def needs_of(**changes: Any) -> OpNeeds:
    base = dict(head_dim=64, num_heads=9, num_kv_heads=3, rope_dim=64, kv_dtype="bf16", block_size=16)
    return OpNeeds(**{**base, **changes})  # type: ignore[arg-type]


def skip_if_declined(ops: Any, names: tuple[str, ...], needs: OpNeeds) -> None:
    reasons = [reason for name in names for reason in ops.supports(name, needs)]
    if reasons:
        assert ops.name != "reference", reasons  # the specification declines nothing
        pytest.skip(f"declined: {reasons[0]}")


def strided(rng: np.random.Generator, rows: int, cols: int, scale: float = 1.0) -> np.ndarray:
    """float32 [rows, cols] that is a column slice of a wider array; its neighbours are NaN, so reading them shows."""
    wide = np.full((rows, cols + 9), np.nan, np.float32)
    wide[:, 4 : 4 + cols] = rng.standard_normal((rows, cols)) * scale
    return wide[:, 4 : 4 + cols]


def close(result: np.ndarray, expected: np.ndarray, allowed: np.ndarray | float) -> None:
    assert result.dtype == np.float32 and result.shape == expected.shape
    error = np.abs(result.astype(np.float64) - expected)
    worst = np.max(error - allowed, initial=-1.0)
    assert not np.isnan(result).any() and worst <= 0, f"off by {worst:.3g} more than allowed; largest error {error.max():.3g}"


# -- row ops ---------------------------------------------------------------------------------------------------------
@every_backend
@pytest.mark.parametrize("cols", [1, 2, 7, 16, 33, 64, 100, 576])
def test_rms_norm(backend, cols):
    rng = np.random.default_rng(cols)
    ops, tolerance = backend.build(), TOLERANCE[backend.name]["rms_norm"]
    weight = rng.standard_normal(cols).astype(np.float32)
    packed = ops.pack_vector(weight)
    for rows in ROWS:
        for scale, eps in ((1.0, 1e-5), (1e-4, 1e-6), (3e4, 1e-5)):
            x = strided(rng, rows, cols, scale)
            ops.begin_step(rows)
            expected = oracle.rms_norm(x, weight, eps)
            close(ops.to_numpy(ops.rms_norm(backend.array(x), packed, eps)), expected, tolerance * np.abs(expected) + 1e-12)


@every_backend
def test_rms_norm_of_zeros_is_zero(backend):
    ops = backend.build()
    ops.begin_step(2)
    weight = ops.pack_vector(np.ones(40, np.float32))
    assert not ops.to_numpy(ops.rms_norm(backend.array(np.zeros((2, 40), np.float32)), weight, 1e-5)).any()


@every_backend
@pytest.mark.parametrize("cols", [1, 7, 16, 31, 64, 200])
def test_silu_mul(backend, cols):
    rng = np.random.default_rng(cols)
    ops, tolerance = backend.build(), TOLERANCE[backend.name]["silu_mul"]
    for rows in ROWS:
        x = strided(rng, rows, 2 * cols, 4.0)
        if rows > 1:  # the ends of exp: silu tends to 0 and to the gate itself
            x[1, :cols] = rng.choice([-3e38, -200.0, -88.5, 0.0, 88.5, 200.0], cols)
        ops.begin_step(rows)
        with np.errstate(over="ignore"):
            expected = oracle.silu_mul(x)
        close(ops.to_numpy(ops.silu_mul(backend.array(x))), expected, tolerance * np.abs(expected) + 1e-35)


@every_backend
@pytest.mark.parametrize("cols", [1, 15, 64, 77])
def test_add_in_place_is_one_rounding(backend, cols):
    rng = np.random.default_rng(cols)
    ops = backend.build()
    for rows in ROWS:
        x, y = strided(rng, rows, cols), strided(rng, rows, cols)
        wide, expected = x.base, x + y
        device_x = backend.array(x)
        ops.begin_step(rows)
        assert ops.add_(device_x, backend.array(y)) is None
        np.testing.assert_array_equal(ops.to_numpy(device_x), expected)
        assert np.isnan(wide[:, :4]).all() and np.isnan(wide[:, 4 + cols :]).all()  # nothing beside it was touched


@every_backend
@pytest.mark.parametrize("cols", [1, 15, 64, 77])
def test_add_and_norm_in_one_have_the_bits_of_both(backend, cols):
    rng = np.random.default_rng(cols)
    ops = backend.build()
    weight = ops.pack_vector(rng.standard_normal(cols).astype(np.float32))
    for rows in ROWS:
        x, y = strided(rng, rows, cols), strided(rng, rows, cols)
        wide, total = x.base, backend.array(x + y)
        device_x = backend.array(x)
        ops.begin_step(rows)
        expected = ops.to_numpy(ops.rms_norm(total, weight, 1e-5)).copy()
        np.testing.assert_array_equal(ops.to_numpy(ops.add_rms_norm(device_x, backend.array(y), weight, 1e-5)), expected)
        np.testing.assert_array_equal(ops.to_numpy(device_x), ops.to_numpy(total))
        assert np.isnan(wide[:, :4]).all() and np.isnan(wide[:, 4 + cols :]).all()  # nothing beside it was touched


@every_backend
def test_take_rows(backend):
    rng = np.random.default_rng(0)
    ops = backend.build()
    x = strided(rng, 9, 37)
    for rows in ([], [0], [8], [1, 3, 4, 8], list(range(9))):
        ops.begin_step(9)
        for index in (backend.array(np.array(rows, np.int32)), np.array(rows, np.int32)):  # on the device, or in NumPy
            np.testing.assert_array_equal(ops.to_numpy(ops.take_rows(backend.array(x), index)), x[rows])


# -- weights ---------------------------------------------------------------------------------------------------------
WEIGHTS = {
    "f32": {}, "f16": {}, "bf16": {},
    "q4_b32": {"zero": 8}, "q4_b32+offset": {"offset": True}, "q4_b32+offset_f32": {"offset": True, "scale_dtype": np.float32},
    "q8_b32": {}, "q8_b32+offset": {"offset": True}, "q8_b32+zero": {"zero": 16, "scale_dtype": np.float32},
    "q8_b16": {}, "q8_b16+offset": {"offset": True, "scale_dtype": np.float32},
    "q4_g128+offset": {"offset": True}, "q4_g128+offset_f32": {"offset": True, "scale_dtype": np.float32}, "q4_g128": {"zero": 8},
    "q8_g128": {}, "q8_g128+offset_f32": {"offset": True, "scale_dtype": np.float32},
}  # fmt: skip


#: [N, K], without and with groups of 128.
SHAPES = [[(1, 32), (7, 64), (16, 96), (37, 576), (65, 160), (128, 1024)], [(1, 128), (19, 384), (65, 1024)]]


def make_weight(rng: np.random.Generator, kind: str, rows: int, cols: int):
    return random_packed(rng, kind.partition("+")[0], rows, cols, **WEIGHTS[kind])


def linear_allowed(
    backend: Backend, kind: str, x: np.ndarray, matrix: np.ndarray, bias: np.ndarray | float, generated: int = 0
) -> np.ndarray:
    """[T, N]: how far `linear` may be from float64 (see TOLERANCE)."""
    limits = TOLERANCE[backend.name]
    x, size = np.abs(x.astype(np.float64)), np.abs(matrix)
    scale = x @ size.T
    allowed = limits["linear"] * (scale + np.abs(bias)) + 1e-12
    in_tiles = (np.arange(len(x)) >= generated) & (backend.isa == "amx") & kind.startswith(("q", "bf16"))
    half_step = 2.0**-8  # relative, of eight significant bits; of two rounded factors (1 + h)(1 + h) - 1
    once = half_step if kind.startswith("bf16") else 2 * half_step + half_step**2
    if "step" in limits and kind.startswith("q"):
        largest = np.where((np.arange(len(x)) < generated) & kind.startswith("q4"), 127, 127 * 128)
        steps = [x[:, k : k + 32].max(axis=1, initial=0.0) / largest for k in range(0, x.shape[1], 32)]
        half_steps = np.repeat(np.stack(steps, axis=1) / 2, 32, axis=1)[:, : x.shape[1]]
        allowed += np.where(in_tiles[:, None], 0.0, limits["step"] * half_steps @ size.T)
    return allowed + np.where(in_tiles[:, None], limits.get("bf16", 0.0) * once * scale, 0.0)


@every_backend
@pytest.mark.parametrize(("kind", "n", "k"), [(kind, *shape) for kind in WEIGHTS for shape in SHAPES["g128" in kind]])
def test_linear(backend, kind, n, k):
    rng = np.random.default_rng(n * k)
    ops = backend.build()
    skip_if_declined(ops, ("pack_linear", "linear"), needs_of(layouts=frozenset({kind.partition("+")[0]})))
    packed, matrix = make_weight(rng, kind, n, k)
    bias = rng.standard_normal(n).astype(np.float32)
    weights = {False: ops.pack_linear([packed]), True: ops.pack_linear([packed], bias)}
    for rows in ROWS:
        x = strided(rng, rows, k)
        for generated in sorted({0, rows // 2, rows}):
            with_bias = generated == rows
            ops.begin_step(rows)
            result = ops.to_numpy(ops.linear(backend.array(x), weights[with_bias], generated))
            shift = bias if with_bias else 0.0
            close(result, x.astype(np.float64) @ matrix.T + shift, linear_allowed(backend, kind, x, matrix, shift, generated))


@every_backend
@pytest.mark.parametrize(("kind", "k"), [*itertools.product(("f32", "f16", "bf16"), (1, 2, 33, 61)), ("q8_b16", 16), ("q8_b16+offset", 48)])
def test_linear_with_odd_inner_size(backend, kind, k):
    """K that fills no vector; for q8_b16, half a block of 32."""
    rng = np.random.default_rng(k)
    ops = backend.build()
    packed, matrix = make_weight(rng, kind, 19, k)
    weight = ops.pack_linear([packed])
    for rows in ROWS:
        x = strided(rng, rows, k)
        ops.begin_step(rows)
        result = ops.to_numpy(ops.linear(backend.array(x), weight, rows // 2))
        close(result, x.astype(np.float64) @ matrix.T, linear_allowed(backend, kind, x, matrix, 0.0, rows // 2))


@every_backend
@pytest.mark.parametrize("kind", ["q4_b32", "q4_b32+offset_f32", "q8_b32+offset", "q8_b32"])
@pytest.mark.parametrize("gap", [0, 3])
def test_blocks_are_read_where_they_lie(backend, kind, gap):
    """Records of scale, offset and data, as a file holds them: the same weight as from separate arrays, to the bit."""
    rng = np.random.default_rng(3)
    packed, _ = make_weight(rng, kind, 21, 96)
    width = 16 if packed.layout == "q4_b32" else 32
    scale, data = packed.scale.dtype.str, packed.data.dtype.str
    record = np.zeros((21, 3), np.dtype([("d", scale), ("m", scale), ("qs", data, width), ("gap", "u1", gap * packed.scale.itemsize)]))
    record["d"], record["qs"] = packed.scale, packed.data.reshape(21, 3, width)
    offset = record["m"] if packed.offset is not None else None
    if offset is not None:
        offset[:] = packed.offset
    views = PackedTensor(packed.layout, packed.shape, record["qs"], record["d"], offset, packed.zero)
    x, results = strided(rng, 5, 96), []
    np.testing.assert_array_equal(layout.dequantize(views), layout.dequantize(packed))
    for part in (packed, views):
        ops = backend.build()
        weight = ops.pack_linear([part])
        ops.begin_step(5)
        results.append(ops.to_numpy(ops.linear(backend.array(x), weight, 2)).copy())
    record["qs"] = 0  # copied: the parts' memory may go
    np.testing.assert_array_equal(*results)


@every_backend
@pytest.mark.parametrize(
    "kinds", [("q4_b32", "q4_b32"), ("q4_b32", "q8_b16", "f16"), ("q4_b32+offset", "q4_b32"), ("f32", "bf16", "q8_b32")], ids="-".join
)
def test_parts_are_stacked_in_order(backend, kinds):
    """q, k and v in one weight, their layouts may differ; the parts' memory may go afterwards."""
    rng = np.random.default_rng(len(kinds))
    ops = backend.build()
    made = [make_weight(rng, kind, rows, 64) for kind, rows in zip(kinds, (24, 9, 16), strict=False)]
    matrix = np.concatenate([values for _, values in made])
    bias = rng.standard_normal(len(matrix)).astype(np.float32)
    weight = ops.pack_linear([packed for packed, _ in made], bias)
    handed_in, bias = bias, bias.copy()
    for array in (handed_in, *(packed.data for packed, _ in made)):
        array[:] = 0
    x = strided(rng, 5, 64)
    ops.begin_step(5)
    parts = [(kind, values, slice(start, start + len(values))) for kind, (_, values), start in zip(kinds, made, (0, 24, 33), strict=False)]
    allowed = [linear_allowed(backend, kind, x, values, bias[columns], 2) for kind, values, columns in parts]
    result = ops.to_numpy(ops.linear(backend.array(x), weight, 2))
    close(result, x.astype(np.float64) @ matrix.T + bias, np.concatenate(allowed, axis=1))


@every_backend
def test_weights_may_be_read_only_and_strided(backend):
    """As views of a mapped file are."""
    rng = np.random.default_rng(2)
    ops = backend.build()
    packed, matrix = random_packed(rng, "q8_b32", 12, 64)
    wide = np.zeros((12, 80), np.int8)
    wide[:, :64] = packed.data
    wide.flags.writeable = False
    view = type(packed)("q8_b32", (12, 64), wide[:, :64], packed.scale)
    ids = np.arange(12, dtype=np.int32)
    ops.begin_step(12)
    result = ops.to_numpy(ops.embedding(backend.array(ids), ops.pack_linear([view])))
    close(result, matrix, 1e-6 * np.abs(matrix))


@every_backend
@pytest.mark.parametrize("kind", WEIGHTS)
def test_embedding_is_the_dequantised_row(backend, kind):
    rng = np.random.default_rng(3)
    ops = backend.build()
    packed, matrix = make_weight(rng, kind, 23, 384 if "g128" in kind else 96)
    weight = ops.pack_linear([packed])
    for ids in ([], [0], [22], [5, 5, 0, 22, 7] * 4):
        ops.begin_step(len(ids))
        result = ops.to_numpy(ops.embedding(backend.array(np.array(ids, np.int32)), weight))
        # At most the roundings of one multiplication and one addition, each half a unit of its result.
        product = np.abs(matrix[ids]) if packed.offset is None else np.abs(matrix[ids]) + 20.0
        close(result, matrix[ids], 2.0**-23 * product)


@every_backend
def test_wrong_weights_are_refused(backend):
    rng = np.random.default_rng(4)
    ops = backend.build()
    short, _ = random_packed(rng, "q8_b32", 4, 64)
    long, _ = random_packed(rng, "q8_b32", 4, 96)
    broken = [
        [short, long],
        [type(short)("q8_b32", (4, 96), short.data, short.scale)],
        [type(short)("q8_b32", (4, 64), short.data, None)],
        [type(short)("q8_b32", (4, 64), short.data, long.scale)],
    ]
    for parts in broken:
        with pytest.raises(ValueError):
            ops.pack_linear(parts)
    with pytest.raises(ValueError):
        ops.pack_linear([short], np.zeros(5, np.float32))


# -- attention and KV ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    rope_dim: int = 64
    dtype: str = "f32"
    block_size: int = 16
    window: int | None = None
    softcap: float = 0.0

    def __str__(self) -> str:
        name = f"{self.heads}x{self.kv_heads}x{self.dim}-{self.dtype}-block{self.block_size}"
        name += f"-rope{self.rope_dim}" if self.rope_dim != self.dim else ""
        name += f"-window{self.window}" if self.window is not None else ""
        return name + (f"-cap{self.softcap:g}" if self.softcap else "")


GROUPED = [(1, 1), (3, 3), (4, 2), (9, 3), (4, 1), (10, 2), (6, 1), (28, 4), (8, 1), (16, 2)]
CASES = [
    *(Case(heads=heads, kv_heads=kv_heads) for heads, kv_heads in GROUPED),
    *(Case(heads=4, kv_heads=2, dim=dim, rope_dim=dim) for dim in (32, 40, 80, 96, 112, 128, 192, 256)),
    *(Case(dtype=dtype) for dtype in ("f16", "bf16")),
    *(Case(dtype="bf16", dim=dim, rope_dim=dim, heads=4, kv_heads=2) for dim in (32, 128)),
    *(Case(block_size=size) for size in (1, 5, 8, 32, 64)),
    *(Case(window=window) for window in (1, 2, 15, 16, 17, 40)),
    Case(window=17, dtype="bf16"), Case(window=3, block_size=5),
    Case(softcap=30.0), Case(softcap=0.5), Case(softcap=2.0, window=9, dtype="bf16"),
    Case(rope_dim=32), Case(rope_dim=2), Case(rope_dim=16, dtype="bf16"),
    *(Case(dtype="int8", heads=heads, kv_heads=kv_heads) for heads, kv_heads in ((4, 4), (9, 3), (7, 1), (18, 2))),
    *(Case(dtype="int8", dim=dim, rope_dim=dim, heads=4, kv_heads=2) for dim in (32, 40, 128, 256)),
    Case(dtype="int8", window=17), Case(dtype="int8", softcap=2.0, window=9), Case(dtype="int8", block_size=5),
]  # fmt: skip
#: Decoding streams, resumed and fresh prompts, a chunk that ends inside a block, one at a block's edge, an empty one.
SEGMENTS = [Segment(1, 1), Segment(1, 33), Segment(1, 16), Segment(1, 17), Segment(0, 5), Segment(9, 9), Segment(5, 37), Segment(16, 48)]
KV_OPS = ("rope_table", "rope_kv_write", "attend", "alloc_kv", "export_block", "import_block")
THETA = 10000.0


def kv_setup(backend: Backend, case: Case, segments: list[Segment] = SEGMENTS, layers: int = 2):
    """Ops, the batch on the host, a pool whose used slots hold random values and all others NaN, and its contents."""
    rng = np.random.default_rng(case.heads * case.dim + case.block_size)
    ops = backend.build()
    needs = needs_of(head_dim=case.dim, num_heads=case.heads, num_kv_heads=case.kv_heads, rope_dim=case.rope_dim, kv_dtype=case.dtype,
                     block_size=case.block_size, sliding_window=case.window is not None, softcap=case.softcap > 0)  # fmt: skip
    skip_if_declined(ops, KV_OPS, needs)
    num_blocks = sum(-(-s.length // case.block_size) for s in segments) + 3
    spec = KVSpec(layers, num_blocks, case.block_size, case.kv_heads, case.dim, case.dtype)  # type: ignore[arg-type]
    kv = ops.alloc_kv(spec)
    batch = make_batch(rng, segments, spec, kv)
    # Stale memory need not be finite: another request may have left NaN in a block it gave back.
    values = np.full((num_blocks, layers, 2, case.kv_heads, case.block_size, case.dim), np.nan, np.float32)
    for index, segment in enumerate(segments):
        for position in range(segment.length):
            block = batch.block_tables[0][index, position // case.block_size]
            values[block, :, :, :, position % case.block_size] = rng.standard_normal((layers, 2, case.kv_heads, case.dim))
    for block in range(num_blocks):
        ops.import_block(kv, block, values[block])
    qkv = strided(rng, batch.num_rows, (case.heads + 2 * case.kv_heads) * case.dim)
    return ops, batch, kv, qkv


def pool_contents(ops: Any, kv: Any, num_blocks: int) -> np.ndarray:
    """float64 [blocks, layers, 2, KH, block_size, D]."""
    return np.stack([ops.export_block(kv, block) for block in range(num_blocks)]).astype(np.float64)


@every_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rope_kv_write_and_attend(backend, case):
    ops, host, kv, qkv = kv_setup(backend, case)
    num_blocks = sum(-(-s.length // case.block_size) for s in SEGMENTS) + 3
    before = pool_contents(ops, kv, num_blocks)
    ops.begin_step(host.num_rows)
    batch = ops.to_device(host)
    rope = ops.rope_table(RopeConfig(theta=THETA, dim=case.rope_dim), 64)
    q = ops.rope_kv_write(backend.array(qkv), rope, 1, batch, 0, case.heads)
    after = pool_contents(ops, kv, num_blocks)
    check_written(backend, case, host, qkv, ops.to_numpy(q), before, after)

    scale = case.dim**-0.5
    result = ops.to_numpy(ops.attend(q, 1, batch, 0, scale, case.window, case.softcap))
    assert result.shape == (host.num_rows, case.heads * case.dim)
    queries = ops.to_numpy(q)
    expected = np.zeros((host.num_rows, case.heads, case.dim))
    for segment in range(len(SEGMENTS)):
        keys, values = sequence_kv(after, host, segment, case)
        for row in range(*host.query_start_loc[segment : segment + 2]):
            expected[row] = oracle.attend(queries[row], keys, values, int(host.positions[row]), scale, case.window, case.softcap)
    largest = np.nanmax(np.abs(after))
    close(result, expected.reshape(result.shape), TOLERANCE[backend.name]["attend"] * largest)


def sequence_kv(pool: np.ndarray, batch: Any, segment: int, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """K and V [KH, tokens, D] of one sequence, layer 1."""
    length = int(batch.seq_lens[segment])
    tokens = [pool[batch.block_tables[0][segment, p // case.block_size], 1, :, :, p % case.block_size] for p in range(length)]
    both = np.stack(tokens, axis=2)  # [2, KH, tokens, D]
    return both[0], both[1]


def check_written(backend: Backend, case: Case, batch: Any, qkv: np.ndarray, q: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
    """q and k rotated, k and v rounded into their slots of layer 1, and not one other number of the pool changed."""
    limit = TOLERANCE[backend.name]["rope"]
    half_unit = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.0}[case.dtype]  # of a number
    half_step = (1 + 2.0**-8) / 254 if case.dtype == "int8" else 0.0  # of the largest number of a vector
    heads = qkv.reshape(batch.num_rows, case.heads + 2 * case.kv_heads, case.dim)
    untouched = before.copy()
    for row in range(batch.num_rows):
        block, offset = divmod(int(batch.slot_mapping[0][row]), case.block_size)
        for head in range(case.heads):
            expected = oracle.rotate(heads[row, head], int(batch.positions[row]), THETA, case.rope_dim)
            np.testing.assert_allclose(q[row, head], expected, rtol=0, atol=limit * np.abs(heads[row, head]).max())
        for kv_head in range(case.kv_heads):
            k, v = heads[row, case.heads + kv_head], heads[row, case.heads + case.kv_heads + kv_head]
            stored_k, stored_v = after[block, 1, :, kv_head, offset]
            np.testing.assert_array_equal(stored_v, oracle.round_kv(v, case.dtype))
            np.testing.assert_array_equal(stored_k, oracle.round_kv(stored_k, case.dtype))  # a number of that dtype
            exact = oracle.rotate(k, int(batch.positions[row]), THETA, case.rope_dim)
            allowed = half_unit * np.abs(exact) + half_step * np.abs(exact).max() + limit * np.abs(k).max() + 1e-7 * half_unit
            assert (np.abs(stored_k - exact) <= allowed).all()
        untouched[block, 1, :, :, offset] = after[block, 1, :, :, offset]
    np.testing.assert_array_equal(untouched, after)


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("case", [Case(), Case(window=17), Case(window=3, block_size=5)], ids=str)
def test_long_prompts_are_attended_in_runs(name, case, monkeypatch):
    """The same rows when scores are computed three rows at a time, as they are for a prompt of many thousand tokens."""
    backend = next(p.values[0] for p in backends() if p.id == name)
    if name == "torch":
        pytest.importorskip("torch", reason="the torch extra is not installed")
    module = importlib.import_module(f"octavo.ops.{name}.attention")

    def run() -> np.ndarray:
        ops, host, _, qkv = kv_setup(backend, case)
        ops.begin_step(host.num_rows)
        batch = ops.to_device(host)
        q = ops.rope_kv_write(backend.array(qkv), ops.rope_table(RopeConfig(theta=THETA, dim=64), 64), 1, batch, 0, case.heads)
        return ops.to_numpy(ops.attend(q, 1, batch, 0, 0.125, case.window)).copy()

    expected = run()
    monkeypatch.setattr(module, "_MAX_SCORES", 3 * case.heads * 48)
    close(run(), expected.astype(np.float64), TOLERANCE[name]["attend"] * 4)


@every_backend
def test_attention_of_no_rows(backend):
    case = Case()
    ops, host, _, qkv = kv_setup(backend, case, segments=[])
    ops.begin_step(0)
    batch = ops.to_device(host)
    q = ops.rope_kv_write(backend.array(qkv), ops.rope_table(RopeConfig(theta=THETA, dim=64), 8), 0, batch, 0, case.heads)
    assert tuple(q.shape) == (0, 9, 64)
    assert ops.to_numpy(ops.attend(q, 0, batch, 0, 0.125)).shape == (0, 9 * 64)


@every_backend
def test_sharp_attention_stays_finite(backend):
    """Scores in the thousands: the softmax must subtract its maximum."""
    case = Case(heads=2, kv_heads=1)
    ops, host, kv, qkv = kv_setup(backend, case)
    qkv *= 100.0
    ops.begin_step(host.num_rows)
    batch = ops.to_device(host)
    q = ops.rope_kv_write(backend.array(qkv), ops.rope_table(RopeConfig(theta=THETA, dim=64), 64), 1, batch, 0, case.heads)
    result = ops.to_numpy(ops.attend(q, 1, batch, 0, 0.125))
    assert np.isfinite(result).all() and np.abs(result).max() > 100


@every_backend
def test_chunks_write_and_attend_like_one(backend):
    """A prompt in one step, and in chunks of 1, 7 and 8 over the same blocks: the same KV, the same rows."""
    case = Case(heads=4, kv_heads=2, dtype="bf16")
    segment = [Segment(23, 23)]
    ops, whole, kv, qkv = kv_setup(backend, case, segments=segment, layers=1)
    rope = ops.rope_table(RopeConfig(theta=THETA, dim=64), 64)
    table = whole.block_tables[0]

    def run(start: int, end: int) -> np.ndarray:
        host = make_batch(np.random.default_rng(0), [Segment(end - start, end)], kv_spec, kv)
        slots = [int(table[0, p // 16]) * 16 + p % 16 for p in range(start, end)]
        host.block_tables, host.slot_mapping = (table,), (np.array(slots, np.int64),)
        ops.begin_step(end - start)
        batch = ops.to_device(host)
        q = ops.rope_kv_write(backend.array(qkv[start:end]), rope, 0, batch, 0, case.heads)
        return ops.to_numpy(ops.attend(q, 0, batch, 0, 0.125)).copy()

    kv_spec = KVSpec(1, 5, 16, 2, 64, "bf16")
    expected = run(0, 23)
    in_chunks = np.concatenate([run(0, 1), run(1, 8), run(8, 15), run(15, 16), run(16, 23)])
    close(in_chunks, expected.astype(np.float64), TOLERANCE[backend.name]["attend"] * np.abs(qkv).max())


# -- KV blocks -------------------------------------------------------------------------------------------------------
BLOCK_SHAPES = [(1, 1, 32, 16), (3, 2, 64, 16), (2, 3, 80, 5), (2, 1, 128, 1), (1, 4, 256, 32)]


@every_backend
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize(("layers", "heads", "dim", "size"), BLOCK_SHAPES)
def test_blocks_export_import_and_copy(backend, dtype, layers, heads, dim, size):
    rng = np.random.default_rng(layers * dim)
    ops = backend.build()
    needs = needs_of(head_dim=dim, num_heads=heads, num_kv_heads=heads, rope_dim=dim, kv_dtype=dtype, block_size=size)
    skip_if_declined(ops, ("alloc_kv", "copy_blocks", "export_block", "import_block"), needs)
    kv = ops.alloc_kv(KVSpec(layers, 7, size, heads, dim, dtype))
    written = rng.standard_normal((7, layers, 2, heads, size, dim)).astype(np.float32)
    for block in range(7):
        ops.import_block(kv, block, written[block])
    first = [ops.export_block(kv, block) for block in range(7)]
    handed_out, first = first, [block.copy() for block in first]
    assert all(block.dtype == np.float32 for block in first)
    for exported, values in zip(first, written, strict=True):
        np.testing.assert_array_equal(exported, oracle.round_kv(values, dtype))  # rounded once, nothing lost or moved
    ops.import_block(kv, 0, first[5])  # exact for values that came from an export
    np.testing.assert_array_equal(ops.export_block(kv, 0), first[5])

    ops.copy_blocks(kv, [1, 2, 2], [6, 3, 4])
    expected = [first[5], first[1], first[2], first[2], first[2], first[5], first[1]]
    for block, values in enumerate(expected):
        np.testing.assert_array_equal(ops.export_block(kv, block), values)
    ops.copy_blocks(kv, [], [])
    for exported in handed_out:
        exported[:] = 0  # copies: the pool must not follow
    np.testing.assert_array_equal(ops.export_block(kv, 1), first[1])


@every_backend
def test_blocks_move_between_backends(backend):
    """What one backend exports, the reference imports unchanged."""
    spec = KVSpec(2, 3, 16, 2, 64, "bf16")
    ops, reference = backend.build(), _reference()
    ours, theirs = ops.alloc_kv(spec), reference.alloc_kv(spec)
    ops.import_block(ours, 1, np.random.default_rng(0).standard_normal((2, 2, 2, 16, 64)).astype(np.float32))
    reference.import_block(theirs, 2, ops.export_block(ours, 1))
    np.testing.assert_array_equal(reference.export_block(theirs, 2), ops.export_block(ours, 1))


@every_backend
def test_block_bytes_cover_what_is_stored(backend):
    ops = backend.build()
    for dtype, least in (("f32", 4), ("f16", 2), ("bf16", 2), ("int8", 1)):
        spec = KVSpec(3, 1, 16, 2, 64, dtype)
        numbers = 3 * 2 * 16 * 2 * 64
        assert least * numbers <= ops.kv_block_bytes(spec) <= 4 * numbers + 4096
        assert ops.kv_block_bytes(KVSpec(3, 1000, 16, 2, 64, dtype)) == ops.kv_block_bytes(spec)


# -- the rest of the protocol ----------------------------------------------------------------------------------------
@every_backend
@pytest.mark.parametrize(
    "needs",
    [
        OpNeeds(64, 9, 3, 64, "bf16", 16, layouts=frozenset({"q4_b32", "q8_b32", "q8_b16", "f32", "f16", "bf16"})),  # SmolLM2
        OpNeeds(128, 28, 4, 128, "bf16", 16, layouts=frozenset({"q4_b32", "q8_b16", "f32"})),  # Qwen2.5-7B
        OpNeeds(128, 28, 4, 128, "f32", 16, layouts=frozenset({"bf16"})),
    ],
)
def test_supports_real_models(backend, needs):
    ops = backend.build()
    assert {name: ops.supports(name, needs) for name in OP_NAMES} == {name: [] for name in OP_NAMES}


@every_backend
def test_supports_gives_reasons(backend):
    ops = backend.build()
    assert ops.supports("no_such_op", needs_of())
    assert ops.supports("attend", needs_of(num_heads=8, num_kv_heads=3))
    assert ops.supports("rope_kv_write", needs_of(rope_dim=63))
    assert ops.supports("linear", needs_of(layouts=frozenset({"q3_b7"})))
    assert all(isinstance(reason, str) and reason for reason in ops.supports("attend", needs_of(block_size=0)))


@every_backend
def test_describe_is_plain_data(backend):
    import json

    facts = backend.build().describe()
    assert json.loads(json.dumps(facts)) == facts and facts


@every_backend
def test_outputs_lie_in_the_arena_and_scopes_give_them_back(backend):
    ops = backend.build()
    weight = ops.pack_vector(np.ones(48, np.float32))
    x = backend.array(np.ones((3, 48), np.float32))

    def address(array: Any) -> int:
        return array.data_ptr() if backend.name == "torch" else array.__array_interface__["data"][0]

    ops.begin_step(3)
    with ops.arena.scope():
        inside = address(ops.rms_norm(x, weight, 1e-5))
        assert address(ops.silu_mul(x)) != inside
    assert address(ops.rms_norm(x, weight, 1e-5)) == inside
    ops.begin_step(1)
    assert address(ops.rms_norm(x[:1], weight, 1e-5)) == inside  # one row or three: the same place
    ops.begin_step(CAPACITY_ROWS * 3)  # more rows than it was built for
    big = backend.array(np.full((CAPACITY_ROWS * 3, 48), 2.0, np.float32))
    assert ops.to_numpy(ops.rms_norm(big, weight, 0.0)).shape == (CAPACITY_ROWS * 3, 48)


# -- perf mode -------------------------------------------------------------------------------------------------------
def perf(names: list[str]) -> None:
    """Prints microseconds per call of each op on SmolLM2's shapes."""
    for parameter in backends():
        backend = parameter.values[0]
        if parameter.marks or (names and parameter.id not in names):
            continue
        for rows in (1, 8, 32):
            ops, calls = perf_calls(backend, rows)
            for name, call in calls.items():
                print(f"{parameter.id:16} rows {rows:3}  {name:20} {microseconds(ops, rows, call):10.1f} us")


def perf_calls(backend: Backend, rows: int) -> tuple[Any, dict[str, Callable[[], Any]]]:
    rng = np.random.default_rng(0)
    ops, host, _, qkv_rows = kv_setup(backend, Case(dtype="bf16"), [Segment(1, 256)] * rows, layers=1)
    weight = ops.pack_linear([random_packed(rng, "q4_b32", 960, 576, offset=True)[0]])
    norm, rope = ops.pack_vector(np.ones(576, np.float32)), ops.rope_table(RopeConfig(theta=THETA, dim=64), 512)
    x, wide = (backend.array(rng.standard_normal((rows, n)).astype(np.float32)) for n in (576, 3072))
    qkv, batch = backend.array(qkv_rows), ops.to_device(host)
    q = backend.array(rng.standard_normal((rows, 9, 64)).astype(np.float32))
    return ops, {
        "rms_norm 576": lambda: ops.rms_norm(x, norm, 1e-5),
        "silu_mul 1536": lambda: ops.silu_mul(wide),
        "linear q4 960x576": lambda: ops.linear(x, weight, rows),
        "rope_kv_write": lambda: ops.rope_kv_write(qkv, rope, 0, batch, 0, 9),
        "attend 256 keys": lambda: ops.attend(q, 0, batch, 0, 0.125),
    }


def microseconds(ops: Any, rows: int, call: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(20):
            ops.begin_step(rows)
            call()
        best = min(best, (time.perf_counter() - start) / 20)
    return best * 1e6


if __name__ == "__main__":
    if "--perf" not in sys.argv:
        sys.exit("usage: python -m tests.ops.test_matrix --perf [backend ...]; run the tests with pytest")
    perf([name for name in sys.argv[1:] if name != "--perf"])
