"""Native linear and embedding: the exact arithmetic of docs/numerics.md, extremes of every layout, hostile arguments.

The oracle rounds activations per block of 32 itself, to 15 bits or 8, and goes on in float64, so that what is left is float32 rounding:
a wrong scale, offset, zero or order of nibbles cannot hide behind quantisation noise. Where level amx computes prompt rows in tiles,
it rounds both operands to bfloat16 instead.
"""

from __future__ import annotations

import numpy as np
import pytest

from octavo.ops.api import PackedTensor
from tests.ops.op_oracle import bf16_round, pack_q, random_packed

_native = pytest.importorskip("octavo._native", reason="the native module is not built")
CpuOps = pytest.importorskip("octavo.ops.cpu").CpuOps
LEVELS = _native.isa_levels()
QUANTISED = ["q4_b32", "q8_b32", "q8_b16"]
FLOATS = ["f32", "f16", "bf16"]
#: The largest quantised activation, and the largest where generated rows meet 4-bit weights.
WIDE, BYTES = 127 * 128, 127


def rounded_activations(x: np.ndarray, layout: str) -> np.ndarray:
    """float64: x as the kernels see it in `run`, integers per block of 32 with scale amax / largest. q is chosen in float32."""
    padded = np.zeros((x.shape[0], -(-x.shape[1] // 32) * 32), np.float32)
    padded[:, : x.shape[1]] = x
    blocks = padded.reshape(x.shape[0], -1, 32)
    amax = np.abs(blocks).max(axis=2, keepdims=True)
    safe = np.where(amax > 0, amax, 1).astype(np.float32)
    generated = np.arange(len(x)) < num_generated(len(x))
    largest = np.where(generated & (layout == "q4_b32"), BYTES, WIDE).astype(np.float32)[:, None, None]
    q = np.rint(blocks * (largest / safe)).astype(np.float64)
    return (q * (safe / largest).astype(np.float64)).reshape(padded.shape)[:, : x.shape[1]]


def in_tiles(isa: str, layout: str, rows: int) -> np.ndarray:
    """bool [rows]: which rows of `run` meet the weights as bfloat16."""
    return (np.arange(rows) >= num_generated(rows)) & (isa == "amx") & (layout in [*QUANTISED, "bf16"])


def float32_weights(packed: PackedTensor) -> np.ndarray:
    """The values of a quantised weight: scale * (q - zero) + offset, each operation rounded to float32."""
    rows, cols = packed.shape
    data = packed.data.astype(np.int32)
    if packed.layout == "q4_b32":
        nibbles = data.reshape(rows, -1, 16)
        data = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(rows, cols)
    block = cols // packed.scale.shape[1]
    values = np.repeat(packed.scale.astype(np.float32), block, axis=1) * (data - packed.zero).astype(np.float32)
    return values if packed.offset is None else values + np.repeat(packed.offset.astype(np.float32), block, axis=1)


def products(isa: str, x: np.ndarray, packed: PackedTensor, matrix: np.ndarray) -> np.ndarray:
    """float64 [T, N]: `run` without the rounding of its sums. matrix: the exact values of `packed`."""
    seen = rounded_activations(x, packed.layout) if packed.layout in QUANTISED else x.astype(np.float64)
    result, tiled = seen @ matrix.T, in_tiles(isa, packed.layout, len(x))
    if tiled.any():
        weights = float32_weights(packed) if packed.layout in QUANTISED else matrix
        result[tiled] = bf16_round(x[tiled]) @ bf16_round(weights).T
    return result


def num_generated(rows: int) -> int:
    """Of the rows that `run` computes: the larger half."""
    return (rows + 1) // 2


def run(ops, x: np.ndarray, weight) -> np.ndarray:
    ops.begin_step(len(x))
    return ops.linear(x, weight, num_generated(len(x))).copy()


def close(isa: str, result: np.ndarray, x: np.ndarray, packed: PackedTensor, matrix: np.ndarray, shift: np.ndarray | float = 0.0) -> None:
    allowed = 2e-6 * (np.abs(x) @ np.abs(matrix).T + np.abs(shift)) + 1e-30
    error = np.abs(result - (products(isa, x, packed, matrix) + shift))
    assert (error <= allowed).all(), f"largest error {error.max():.3g}, {np.max(error / allowed):.3g} times what is allowed"


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("layout", QUANTISED)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("scale_dtype", [np.float16, np.float32])
@pytest.mark.parametrize("n,k,zero", [(1, 32, 0), (16, 64, 8), (45, 96, 0), (50, 320, 3), (33, 576, -5)])
def test_quantised_weights_against_exact_activations(isa, layout, offset, scale_dtype, n, k, zero):
    rng = np.random.default_rng(n * k)
    packed, matrix = random_packed(rng, layout, n, k, offset=offset, zero=zero, scale_dtype=scale_dtype)
    bias = rng.standard_normal(n).astype(np.float32)
    ops = CpuOps(64, threads=2, isa=isa)
    weight = ops.pack_linear([packed], bias)
    # An offset's and a zero's share must be taken into account separately: they may cancel in `matrix`.
    scales = np.repeat(np.abs(packed.scale.astype(np.float64)), k // packed.scale.shape[1], axis=1)
    parts = np.abs(matrix) + scales * (128 + abs(zero))
    for rows in (1, 2, 3, 4, 7, 8, 13):
        x = (rng.standard_normal((rows, k)) * 10 ** rng.uniform(-3, 3, (rows, 1))).astype(np.float32)
        allowed = 2e-6 * (np.abs(rounded_activations(x, layout)) @ parts.T + np.abs(bias))
        error = np.abs(run(ops, x, weight) - (products(isa, x, packed, matrix) + bias))
        assert (error <= allowed).all(), f"{np.max(error / allowed):.3g} times what is allowed at {rows} rows"


@pytest.mark.parametrize("isa", LEVELS)
def test_half_blocks_may_leave_half_an_activation_block(isa):
    """q8_b16 with K a multiple of 16 and not of 32."""
    rng = np.random.default_rng(5)
    packed, matrix = random_packed(rng, "q8_b16", 21, 48, offset=True, zero=2)
    ops = CpuOps(8, threads=1, isa=isa)
    x = rng.standard_normal((5, 48)).astype(np.float32)
    close(isa, run(ops, x, ops.pack_linear([packed])), x, packed, matrix)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("layout,q", [("q4_b32", 15), ("q4_b32", 0), ("q8_b32", -128), ("q8_b32", 127), ("q8_b16", -128)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_weights_and_activations_do_not_saturate(isa, layout, q, sign):
    """16-bit partial sums at their largest: every weight and every activation at the end of its range."""
    n, k, block = 20, 128, 16 if layout == "q8_b16" else 32
    scale = np.ones((n, k // block), np.float16)
    packed = PackedTensor(layout, (n, k), pack_q(layout, np.full((n, k), q)), scale)
    ops = CpuOps(8, threads=1, isa=isa)
    weight = ops.pack_linear([packed])
    for rows in (1, 4):
        x = np.full((rows, k), sign * 127.0, np.float32)
        assert np.array_equal(run(ops, x, weight), np.full((rows, n), sign * 127.0 * q * k, np.float32))


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("layout", FLOATS)
@pytest.mark.parametrize("n,k", [(1, 1), (16, 31), (70, 64), (129, 200)])
def test_float_weights(isa, layout, n, k):
    rng = np.random.default_rng(n + k)
    packed, matrix = random_packed(rng, layout, n, k)
    bias = rng.standard_normal(n).astype(np.float32)
    ops = CpuOps(16, threads=2, isa=isa)
    weight = ops.pack_linear([packed], bias)
    for rows in (1, 2, 5, 9):
        x = rng.standard_normal((rows, k)).astype(np.float32)
        close(isa, run(ops, x, weight), x, packed, matrix, bias)


@pytest.mark.parametrize("isa", LEVELS)
def test_halves_of_every_value_are_exact(isa):
    """All finite halves, subnormal ones too, as float16 weights and as scales."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits[np.isfinite(bits.view(np.float16))]
    halves = halves[: len(halves) // 32 * 32].reshape(32, -1)
    ops = CpuOps(64, threads=1, isa=isa)
    weight = ops.pack_linear([PackedTensor("f16", halves.T.shape, np.ascontiguousarray(halves.T))])
    identity = np.eye(32, dtype=np.float32)
    assert np.array_equal(run(ops, identity, weight), halves.view(np.float16).astype(np.float32))
    q = np.zeros((halves.shape[1], 32 * 32))
    q[:, ::32] = 1
    weight = ops.pack_linear([PackedTensor("q8_b32", q.shape, pack_q("q8_b32", q), halves.view(np.float16).T)])
    x = np.zeros((32, 32 * 32), np.float32)
    x[np.arange(32), np.arange(32) * 32] = 127.0
    expected = halves.view(np.float16).astype(np.float32)
    tiled = in_tiles(isa, "q8_b32", 32)
    expected[tiled] = bf16_round(expected[tiled])
    assert np.array_equal(run(ops, x, weight), expected * 127)


@pytest.mark.parametrize("isa", LEVELS)
def test_parts_of_different_layouts_and_odd_sizes(isa):
    rng = np.random.default_rng(0)
    kinds = [("q4_b32", 17), ("f16", 5), ("q8_b16", 30), ("f32", 16), ("q4_b32", 1), ("bf16", 50)]
    made = [random_packed(rng, layout, n, 64, offset=part == 0) for part, (layout, n) in enumerate(kinds)]
    matrix, bias = np.concatenate([m for _, m in made]), rng.standard_normal(119).astype(np.float32)
    ops = CpuOps(8, threads=2, isa=isa)
    weight = ops.pack_linear([p for p, _ in made], bias)
    assert (weight.k, weight.columns) == (64, 119)
    x = rng.standard_normal((6, 64)).astype(np.float32)
    result = run(ops, x, weight)
    columns = np.repeat(np.arange(6), [17, 5, 30, 16, 1, 50])
    for part, (packed, _) in enumerate(made):
        here = columns == part
        close(isa, result[:, here], x, packed, matrix[here], bias[here])


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("layout", FLOATS + QUANTISED)
def test_embedding_is_the_formula_in_float32(isa, layout):
    rng = np.random.default_rng(1)
    packed, _ = random_packed(rng, layout, 70, 96, offset=layout in QUANTISED, zero=8 if layout in QUANTISED else 0)
    ops = CpuOps(8, threads=2, isa=isa)
    weight = ops.pack_linear([packed])
    one_hot = np.zeros((1, 96), np.float32)
    ids = np.array([69, 0, 33, 33, 16], np.int32)
    ops.begin_step(len(ids))
    rows = ops.embedding(ids, weight).copy()
    if layout in FLOATS:
        for j in (0, 50, 95):
            one_hot[:] = 0
            one_hot[0, j] = 1
            assert np.array_equal(run(ops, one_hot, weight)[0, ids], rows[:, j])
        return
    assert np.array_equal(rows, float32_weights(packed)[ids])


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [2, 4])  # generated, prompt
def test_a_broken_activation_breaks_its_own_row_visibly(isa, bad, row):
    rng = np.random.default_rng(2)
    packed, _ = random_packed(rng, "q4_b32", 20, 96, offset=True)
    ops = CpuOps(8, threads=1, isa=isa)
    weight = ops.pack_linear([packed])
    x = rng.standard_normal((5, 96)).astype(np.float32)
    clean = run(ops, x, weight)
    x[row, 40] = bad
    broken = run(ops, x, weight)
    assert np.isnan(broken[row]).all()
    assert np.array_equal(np.delete(broken, row, 0), np.delete(clean, row, 0))


@pytest.mark.parametrize("isa", LEVELS)
def test_tiny_and_zero_activations(isa):
    """Below the smallest scale of integers a block is zero; bfloat16 reaches as far down as float32, less its subnormal numbers."""
    packed, matrix = random_packed(np.random.default_rng(3), "q8_b32", 20, 64)
    ops = CpuOps(8, threads=1, isa=isa)
    weight = ops.pack_linear([packed])
    x = np.zeros((3, 64), np.float32)
    x[1] = 1e-40
    x[2] = 1e-31
    result, tiled = run(ops, x, weight), in_tiles(isa, "q8_b32", 3)
    assert not result[~tiled].any()
    expected = bf16_round(x[tiled]) @ bf16_round(matrix).T
    assert (np.abs(result[tiled] - expected) <= 2e-6 * (x[tiled].astype(np.float64) @ np.abs(matrix).T)).all()
    assert not run(ops, np.roll(x, 1, axis=0), weight)[2].any()  # 1e-40 of either kind


def test_weights_may_be_views_with_any_row_stride():
    rng = np.random.default_rng(4)
    packed, matrix = random_packed(rng, "q4_b32", 19, 64, offset=True)
    backwards = PackedTensor("q4_b32", (19, 64), packed.data[::-1], packed.scale[::-1], packed.offset[::-1])
    wide = np.zeros((19, 100), np.uint8)
    wide[:, 7:39] = packed.data
    wide.flags.writeable = False
    spaced = PackedTensor("q4_b32", (19, 64), wide[:, 7:39], np.asfortranarray(packed.scale), packed.offset)
    shifted = np.frombuffer(b"x" + packed.scale.tobytes(), np.uint8)[1:].view(np.float16).reshape(packed.scale.shape)
    unaligned = PackedTensor("q4_b32", (19, 64), packed.data, shifted, packed.offset)
    ops = CpuOps(8, threads=1)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    expected = run(ops, x, ops.pack_linear([packed]))
    assert np.array_equal(run(ops, x, ops.pack_linear([backwards])), expected[:, ::-1])
    for other in (spaced, unaligned):
        assert np.array_equal(run(ops, x, ops.pack_linear([other])), expected)
    close(LEVELS[-1], expected, x, packed, matrix)


def test_no_rows():
    packed, _ = random_packed(np.random.default_rng(0), "q4_b32", 20, 64)
    ops = CpuOps(8, threads=1)
    weight = ops.pack_linear([packed])
    ops.begin_step(0)
    assert ops.linear(np.zeros((0, 64), np.float32), weight, 0).shape == (0, 20)
    assert ops.embedding(np.zeros(0, np.int32), weight).shape == (0, 64)


def q4(n=16, k=64, **changes):
    packed, _ = random_packed(np.random.default_rng(0), "q4_b32", n, k)
    fields = {"layout": "q4_b32", "shape": (n, k), "data": packed.data, "scale": packed.scale, "offset": None, "zero": 0}
    return PackedTensor(**(fields | changes))


BAD_PARTS = {
    "unknown layout": q4(layout="q3"),
    "no scale": q4(scale=None),
    "too few scales": q4(scale=np.ones((16, 1), np.float16)),
    "too few rows of scales": q4(scale=np.ones((15, 2), np.float16)),
    "scales of a wrong dtype": q4(scale=np.ones((16, 2), np.float64)),
    "offset of another dtype": q4(offset=np.ones((16, 2), np.float32)),
    "offset of a wrong shape": q4(offset=np.ones((16, 3), np.float16)),
    "data of a wrong dtype": q4(data=np.zeros((16, 32), np.int8)),
    "data of a wrong shape": q4(data=np.zeros((16, 31), np.uint8)),
    "shape that is not the data's": q4(shape=(17, 64)),
    "one dimension": q4(data=np.zeros(512, np.uint8)),
    "zero out of range": q4(zero=1 << 20),
    "part of a block": q4(shape=(16, 48), data=np.zeros((16, 24), np.uint8)),
    "no rows": q4(shape=(0, 64), data=np.zeros((0, 32), np.uint8), scale=np.zeros((0, 2), np.float16)),
    "no columns": q4(shape=(16, 0), data=np.zeros((16, 0), np.uint8), scale=np.zeros((16, 0), np.float16)),
    "scale of a float layout": PackedTensor("f32", (16, 4), np.zeros((16, 4), np.float32), np.ones((16, 1), np.float16)),
    "wrong byte order": PackedTensor("f32", (16, 4), np.zeros((16, 4), ">f4")),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_bad_parts_are_refused(name):
    with pytest.raises((ValueError, TypeError)):
        CpuOps(8, threads=1).pack_linear([BAD_PARTS[name]])


def test_bad_fusions_are_refused():
    ops = CpuOps(8, threads=1)
    with pytest.raises(ValueError, match="same K"):
        ops.pack_linear([q4(), q4(k=96)])
    with pytest.raises(ValueError, match="at least one part"):
        ops.pack_linear([])
    with pytest.raises(ValueError, match="bias"):
        ops.pack_linear([q4()], np.zeros(15, np.float32))
    with pytest.raises((ValueError, TypeError)):
        ops.pack_linear([q4()], np.zeros((16, 1), np.float32))


def test_a_weight_too_large_for_memory_is_a_memory_error():
    data = np.broadcast_to(np.zeros((1, 1024), np.float32), (1 << 40, 1024))
    with pytest.raises(MemoryError, match="weight"):
        CpuOps(8, threads=1).pack_linear([PackedTensor("f32", data.shape, data)])


@pytest.mark.parametrize(
    "x",
    [np.zeros((2, 63), np.float32), np.zeros((2, 64), np.float64), np.zeros(64, np.float32), np.zeros((64, 2), np.float32).T,
     np.zeros((2, 128), np.float32)[:, ::2], np.zeros((2, 64), ">f4"), np.zeros((2, 64, 1), np.float32)],
)  # fmt: skip
def test_bad_activations_are_refused(x):
    ops = CpuOps(8, threads=1)
    weight = ops.pack_linear([q4()])
    with pytest.raises((ValueError, TypeError)):
        ops.linear(x, weight, 0)


def test_bad_outputs_and_handles_are_refused():
    ops = CpuOps(8, threads=1)
    weight, x = ops.pack_linear([q4()]), np.zeros((2, 64), np.float32)
    read_only = np.zeros((2, 16), np.float32)
    read_only.flags.writeable = False
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (2, 16), (4, 4))
    for out in (np.zeros((2, 15), np.float32), np.zeros((3, 16), np.float32), np.zeros((2, 16), np.float64), read_only, overlapping):
        with pytest.raises((ValueError, TypeError)):
            ops._context.linear(x, weight, 0, out)
    for handle in (None, x, object()):
        with pytest.raises((TypeError, AttributeError)):
            ops.linear(x, handle, 0)
    for generated in (-1, 3):
        with pytest.raises(ValueError, match="num_generated"):
            ops.linear(x, weight, generated)


@pytest.mark.parametrize("ids", [[-1], [16], [0, 2**31 - 1], [-(2**31)]])
def test_token_ids_outside_the_matrix_are_refused(ids):
    ops = CpuOps(8, threads=1)
    with pytest.raises(IndexError, match="token id"):
        ops.embedding(np.array(ids, np.int32), ops.pack_linear([q4()]))
    with pytest.raises(TypeError):
        ops.embedding(np.array(ids, np.int64), ops.pack_linear([q4()]))
