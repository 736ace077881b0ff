"""Native rotary embedding, KV pool and paged attention: against float64, with garbage in every unused place, and with hostile
arguments."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.model_config import RopeConfig
from octavo.ops.api import KVSpec, OpNeeds
from octavo.ops.reference import ReferenceOps
from tests.ops import op_oracle as oracle
from tests.ops.op_oracle import Segment, make_batch

_native = pytest.importorskip("octavo._native", reason="the native module is not built")
CpuOps = pytest.importorskip("octavo.ops.cpu").CpuOps
LEVELS = _native.isa_levels()
DTYPES = ["bf16", "f16", "f32", "int8"]


def poisoned_pool(ops, spec: KVSpec):
    """A pool whose every slot holds NaN and infinity: what a block may hold from the sequence that had it before."""
    kv = ops.alloc_kv(spec)
    values = np.full((spec.num_layers, 2, spec.num_kv_heads, 16, spec.head_dim), np.nan, np.float32)
    values[..., ::3] = np.inf
    for block in range(spec.num_blocks):
        ops.import_block(kv, block, values)
    return kv


def fill(ops, kv, spec: KVSpec, batch, layer: int, contents: list[np.ndarray]) -> None:
    """Puts contents[s], float32 [2, KH, length, D], into the blocks of segment s, and nothing elsewhere."""
    for s, whole in enumerate(contents):
        for start in range(0, whole.shape[2], 16):
            block, piece = int(batch.block_tables[0][s, start // 16]), whole[:, :, start : start + 16]
            values = ops.export_block(kv, block)
            values[layer, :, :, : piece.shape[2]] = piece
            ops.import_block(kv, block, values)


def case(rng, ops, spec: KVSpec, segments: list[Segment], heads: int, layer: int):
    kv = poisoned_pool(ops, spec)
    batch = make_batch(rng, segments, spec, kv)
    shapes = [(2, spec.num_kv_heads, s.length, spec.head_dim) for s in segments]
    contents = [oracle.round_kv(rng.standard_normal(shape), spec.dtype).astype(np.float32) for shape in shapes]
    fill(ops, kv, spec, batch, layer, contents)
    q = rng.standard_normal((batch.num_rows, heads, spec.head_dim)).astype(np.float32)
    return batch, contents, q


def expected(batch, contents, q, scale, window, softcap) -> np.ndarray:
    out = np.zeros(q.shape)
    for s, whole in enumerate(contents):
        for t in range(batch.query_start_loc[s], batch.query_start_loc[s + 1]):
            keys, values = whole[0].astype(np.float64), whole[1].astype(np.float64)
            out[t] = oracle.attend(q[t], keys, values, int(batch.positions[t]), scale, window, softcap)
    return out.reshape(len(q), -1)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim,heads,kv_heads", [(8, 4, 4), (10, 6, 2), (64, 9, 3), (50, 5, 1), (256, 2, 1), (16, 71, 1)])
def test_attend(isa, dtype, dim, heads, kv_heads):
    """Splits of 256 keys, tiles of 16 queries and blocks of 16 tokens are all crossed; every unused slot is poison."""
    rng = np.random.default_rng(dim)
    ops = CpuOps(64, threads=2, isa=isa)
    spec = KVSpec(2, 64, 16, kv_heads, dim, dtype)
    segments = [Segment(1, 1), Segment(3, 3), Segment(1, 16), Segment(1, 300), Segment(12, 257), Segment(5, 17)]
    batch, contents, q = case(rng, ops, spec, segments, heads, 1)
    for window, softcap in ((None, 0.0), (5, 0.0), (100, 8.0)):
        ops.begin_step(batch.num_rows)
        result = ops.attend(q, 1, batch, 0, 0.3, window, softcap)
        worst = np.abs(result - expected(batch, contents, q, 0.3, window, softcap)).max()
        assert result.shape == (len(q), heads * dim) and worst <= 2e-5, worst


#: Head size -> query heads for each KV head: every size models have, every ratio from 1 to 9 and one that fills two tiles.
SHAPES = {32: 1, 48: 2, 64: 3, 80: 4, 96: 5, 112: 6, 128: 7, 160: 8, 192: 9, 256: 17}
#: Sequence lengths around blocks, runs of four blocks and splits, each with one row or a few; a segment without rows.
EDGE_LENGTHS = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 513, 1000)
EDGES = [*(Segment(1, n) for n in EDGE_LENGTHS), Segment(4, 258), Segment(0, 9), Segment(7, 34)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", SHAPES)
def test_attend_at_every_edge(dim, dtype):
    """Against float64 at every level; the slots that no row sees hold NaN and infinity."""
    group, kv_heads = SHAPES[dim], 1 if dim > 64 else 2
    spec = KVSpec(1, 260, 16, kv_heads, dim, dtype)
    window, softcap = [(None, 0.0), (250, 0.0), (None, 6.0), (17, 6.0)][list(SHAPES).index(dim) % 4]
    truth = None
    for isa in LEVELS:
        ops = CpuOps(64, threads=2, isa=isa)
        batch, contents, q = case(np.random.default_rng(dim), ops, spec, EDGES, kv_heads * group, 0)
        ops.begin_step(batch.num_rows)
        result = ops.attend(q, 0, batch, 0, dim**-0.5, window, softcap)
        truth = expected(batch, contents, q, dim**-0.5, window, softcap) if truth is None else truth
        assert np.abs(result - truth).max() <= 2e-5
        alone = ops.attend(q[-7:], 0, last_segment(batch), 0, dim**-0.5, window, softcap).copy()
        assert np.array_equal(alone, result[-7:])


def last_segment(batch):
    """The last segment of a batch as a batch of its own."""
    start = int(batch.query_start_loc[-2])
    tables = batch.block_tables[0][-1:]
    return replace(
        batch, positions=batch.positions[start:], query_start_loc=np.array([0, batch.num_rows - start], np.int32), block_tables=(tables,)
    )


@pytest.mark.parametrize("isa", LEVELS)
def test_a_broken_later_token_does_not_reach_earlier_rows(isa):
    """Rows of a tile share the reads of V: a NaN in the value of token 9 must not touch rows 0 to 8 of the same prompt."""
    rng = np.random.default_rng(0)
    ops = CpuOps(64, threads=1, isa=isa)
    spec = KVSpec(1, 8, 16, 1, 32, "bf16")
    batch, contents, q = case(rng, ops, spec, [Segment(16, 16)], 4, 0)
    ops.begin_step(16)
    clean = ops.attend(q, 0, batch, 0, 0.2).copy()
    contents[0][1, 0, 9] = np.nan
    fill(ops, batch.kv[0], spec, batch, 0, contents)
    broken = ops.attend(q, 0, batch, 0, 0.2)
    assert np.array_equal(broken[:9], clean[:9]) and np.isnan(broken[9:]).all()


@pytest.mark.parametrize("isa", LEVELS)
def test_large_scores_do_not_overflow(isa):
    rng = np.random.default_rng(0)
    ops = CpuOps(8, threads=1, isa=isa)
    spec = KVSpec(1, 40, 16, 1, 16, "f32")
    batch, contents, q = case(rng, ops, spec, [Segment(2, 600)], 1, 0)
    ops.begin_step(2)
    result = ops.attend(q * 1e4, 0, batch, 0, 1.0)
    assert np.allclose(result, expected(batch, contents, q * np.float32(1e4), 1.0, None, 0.0), atol=1e-2)
    flat = ops.attend(q * 0, 0, batch, 0, 1.0)
    assert np.allclose(flat[1], contents[0][1, 0].mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim,rope_dim", [(64, 64), (10, 10), (32, 8)])
def test_rope_and_kv_write(isa, dtype, dim, rope_dim):
    rng = np.random.default_rng(dim + rope_dim)
    ops = CpuOps(64, threads=2, isa=isa)
    spec = KVSpec(3, 30, 16, 2, dim, dtype)
    kv = ops.alloc_kv(spec)
    batch = make_batch(rng, [Segment(20, 37), Segment(1, 5), Segment(7, 7)], spec, kv)
    wide = rng.standard_normal((batch.num_rows, 8 * dim + 3)).astype(np.float32)
    qkv = wide[:, 3:]
    ops.begin_step(batch.num_rows)
    rope = ops.rope_table(RopeConfig(theta=500.0, dim=rope_dim), 64)
    result = ops.rope_kv_write(qkv, rope, 1, batch, 0, 4)
    assert result.shape == (batch.num_rows, 4, dim)
    blocks = np.stack([ops.export_block(kv, b) for b in range(30)])
    expected_blocks = np.zeros_like(blocks)
    step = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 1e-6, "int8": 0.0}[dtype]
    for t in range(batch.num_rows):
        heads = qkv[t].reshape(8, dim)
        turned = np.stack([oracle.rotate(head, int(batch.positions[t]), 500.0, rope_dim) for head in heads[:6]])
        assert np.allclose(result[t], turned[:4], atol=2e-6)
        block, offset = divmod(int(batch.slot_mapping[0][t]), 16)
        expected_blocks[block, 1, 0, :, offset] = turned[4:]
        expected_blocks[block, 1, 1, :, offset] = oracle.round_kv(heads[6:], dtype)
    assert np.array_equal(blocks[:, :, 1], expected_blocks[:, :, 1])
    half_steps = np.abs(expected_blocks[:, :, 0]).max(axis=-1, keepdims=True) * ((1 + 2.0**-8) / 254 if dtype == "int8" else 0.0)
    assert (np.abs(blocks[:, :, 0] - expected_blocks[:, :, 0]) <= step * np.abs(expected_blocks[:, :, 0]) + half_steps + 1e-6).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_values_are_rounded_to_nearest_even(dtype):
    """Every float32 exponent, ties included; the two-byte types round as IEEE 754 says, infinities and NaN stay."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 16 * 64 * 2, dtype=np.uint64).astype(np.uint32)
    bits[::3] = bits[::3] & 0xFFFF8000  # ties of bfloat16
    bits[1::3] = bits[1::3] & 0xFFFFF000  # ties of half
    bits[:6] = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x00000001, 0x477FF000]
    values = bits.view(np.float32).reshape(1, 2, 1, 16, 64)
    ops = CpuOps(8, threads=1)
    kv = ops.alloc_kv(KVSpec(1, 1, 16, 1, 64, dtype))
    ops.import_block(kv, 0, values)
    result = ops.export_block(kv, 0)
    if dtype == "bf16":
        wide = bits.astype(np.uint64)
        kept = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32).reshape(values.shape)
    else:
        with np.errstate(over="ignore"):
            kept = values.astype({"f16": np.float16, "f32": np.float32}[dtype]).astype(np.float32)
    finite = ~np.isnan(values)
    assert np.array_equal(result[finite], kept[finite]) and np.isnan(result[~finite]).all()
    ops.import_block(kv, 0, result)
    assert np.array_equal(ops.export_block(kv, 0), result, equal_nan=True)


def test_int8_vectors_are_those_of_the_reference():
    """Every exponent, zeros, subnormal and huge vectors, ties, infinities and NaN: the same bits as the specification's, and what
    was exported is imported without a change."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((40, 2, 3, 16, 10)) * 2.0 ** rng.uniform(-149, 123, (40, 2, 3, 16, 1))).astype(np.float32)
    values[0] = 0
    values[1] = rng.integers(-127, 128, values[1].shape) + rng.choice([0, 0.5], values[1].shape)  # with the 127 below: ties
    values[1, ..., 3] = 127
    values[2, ..., 5], values[3, ..., 0], values[4, ..., 9] = np.nan, np.inf, -np.inf
    values[5, ..., 1] = np.finfo(np.float32).max
    values[6] = np.float32(127 * 2.0**-126) * rng.uniform(0.98, 1.02, values[6].shape).astype(np.float32)
    ops, reference = CpuOps(8, threads=1), ReferenceOps(8)
    spec = KVSpec(40, 1, 16, 3, 10, "int8")
    ours, theirs = ops.alloc_kv(spec), reference.alloc_kv(spec)
    ops.import_block(ours, 0, values)
    reference.import_block(theirs, 0, values)
    stored = ops.export_block(ours, 0)
    assert np.array_equal(stored, reference.export_block(theirs, 0), equal_nan=True)
    assert not stored[0].any() and np.isnan(stored[2:5]).all() and np.isfinite(stored[7:]).all()
    half_step = np.abs(values[7:]).max(axis=-1, keepdims=True) * (1 + 2.0**-8) / 254 + 127 * 2.0**-126
    assert (np.abs(stored[7:] - values[7:].astype(np.float64)) <= half_step).all()
    for pool, backend in ((ours, ops), (theirs, reference)):
        backend.import_block(pool, 0, stored)
        assert np.array_equal(backend.export_block(pool, 0), stored, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks(dtype):
    rng = np.random.default_rng(0)
    spec = KVSpec(3, 9, 16, 2, 10, dtype)
    ops = CpuOps(8, threads=2)
    kv = ops.alloc_kv(spec)
    for block in range(9):
        ops.import_block(kv, block, rng.standard_normal((3, 2, 2, 16, 10)).astype(np.float32))
    before = [ops.export_block(kv, b) for b in range(9)]
    ops.copy_blocks(kv, [1, 1, 8], [4, 0, 2])
    after = [ops.export_block(kv, b) for b in range(9)]
    origin = [1, 1, 8, 3, 1, 5, 6, 7, 8]
    assert all(np.array_equal(after[b], before[origin[b]]) for b in range(9))
    for sources, targets, error in (
        ([0], [9], IndexError), ([-1], [1], IndexError), ([0, 1], [2], ValueError), ([0, 1], [1, 2], ValueError),
        ([0, 1], [2, 2], ValueError),
    ):  # fmt: skip
        with pytest.raises(error):
            ops.copy_blocks(kv, sources, targets)
    ops.copy_blocks(kv, [], [])


def test_block_bytes_are_what_the_pool_takes():
    ops = CpuOps(8, threads=1)
    for dim, dtype, size in ((64, "bf16", 2), (64, "f32", 4), (10, "f16", 2)):
        spec = KVSpec(5, 7, 16, 3, dim, dtype)
        padded = math.ceil(dim / 16) * 16
        assert ops.kv_block_bytes(spec) == 5 * 3 * 2 * 16 * padded * size
        assert ops.alloc_kv(spec).nbytes == 7 * ops.kv_block_bytes(spec)
    spec = KVSpec(5, 7, 16, 3, 40, "int8")  # and a two-byte scale for each vector
    assert ops.kv_block_bytes(spec) == 5 * 3 * 2 * 16 * (48 + 2)
    assert ops.alloc_kv(spec).nbytes == 7 * ops.kv_block_bytes(spec)


@pytest.mark.parametrize(
    "change,error",
    [
        ({"num_blocks": 1 << 60}, MemoryError), ({"num_blocks": 1 << 45}, MemoryError), ({"num_layers": 1 << 62}, MemoryError),
        ({"num_blocks": 0}, ConfigError), ({"num_blocks": -1}, ConfigError),
        ({"num_layers": 0}, ConfigError), ({"num_kv_heads": -3}, ConfigError),
        ({"head_dim": 7}, ConfigError), ({"head_dim": 6}, ConfigError), ({"head_dim": 258}, ConfigError), ({"block_size": 32}, ConfigError),
        ({"dtype": "int4"}, ConfigError),
    ],
)  # fmt: skip
def test_pools_that_cannot_be(change, error):
    with pytest.raises(error):
        CpuOps(8, threads=1).alloc_kv(replace(KVSpec(2, 4, 16, 2, 64, "bf16"), **change))


def test_supports_gives_reasons():
    ops = CpuOps(8, threads=1)
    good = OpNeeds(64, 9, 3, 64, "bf16", 16, layouts=frozenset({"q4_b32", "bf16"}))
    for op in ("linear", "embedding", "attend", "rope_kv_write", "alloc_kv", "rms_norm", "copy_blocks"):
        assert ops.supports(op, good) == []
    assert "16 tokens" in ops.supports("attend", replace(good, block_size=32))[0]
    assert "head size" in ops.supports("attend", replace(good, head_dim=320))[0]
    assert ops.supports("linear", replace(good, layouts=frozenset({"q3"})))
    assert ops.supports("no_such_op", good)


def small():
    rng = np.random.default_rng(0)
    ops = CpuOps(32, threads=1)
    spec = KVSpec(2, 8, 16, 2, 16, "bf16")
    batch = make_batch(rng, [Segment(3, 20), Segment(1, 4)], spec, ops.alloc_kv(spec))
    ops.begin_step(4)
    return ops, batch, rng.standard_normal((4, 4, 16)).astype(np.float32)


BAD_BATCHES = {
    "block past the pool": lambda b: replace(b, block_tables=(np.where(b.block_tables[0] < 8, 8, 0).astype(np.int32),)),
    "negative block": lambda b: replace(b, block_tables=(-np.ones_like(b.block_tables[0]),)),
    "table too short": lambda b: replace(b, block_tables=(b.block_tables[0][:, :1].copy(),)),
    "table for too few segments": lambda b: replace(b, block_tables=(b.block_tables[0][:1],)),
    "int64 table": lambda b: replace(b, block_tables=(b.block_tables[0].astype(np.int64),)),
    "negative position": lambda b: replace(b, positions=b.positions - 18),
    "positions that jump": lambda b: replace(b, positions=b.positions * 2),
    "far position": lambda b: replace(b, positions=b.positions + np.int32(2**31 - 100)),
    "too few positions": lambda b: replace(b, positions=b.positions[:3]),
    "segments that stop early": lambda b: replace(b, query_start_loc=np.array([0, 3, 3], np.int32)),
    "segments that go back": lambda b: replace(b, query_start_loc=np.array([0, 5, 4], np.int32)),
    "negative segment": lambda b: replace(b, query_start_loc=np.array([-1, 3, 4], np.int32)),
    "no segments": lambda b: replace(b, query_start_loc=np.array([], np.int32), block_tables=(np.zeros((0, 1), np.int32),)),
    "no pool": lambda b: replace(b, kv=(None,)),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_attend_refuses_bad_batches(name):
    ops, batch, q = small()
    ops.attend(q, 0, batch, 0, 1.0)
    with pytest.raises((ValueError, IndexError, TypeError)):
        ops.attend(q, 0, BAD_BATCHES[name](batch), 0, 1.0)


def test_attend_refuses_bad_arguments():
    ops, batch, q = small()
    for bad in (q[:, :3], q[:, :, :8], q.reshape(4, 64), q.astype(np.float64), q[:3], q[:, ::2], np.zeros((4, 0, 16), np.float32)):
        with pytest.raises((ValueError, TypeError)):
            ops.attend(bad, 0, batch, 0, 1.0)
    for layer in (-1, 2):
        with pytest.raises(IndexError, match="layer"):
            ops.attend(q, layer, batch, 0, 1.0)
    for window in (0, -1):
        with pytest.raises(ValueError, match="window"):
            ops.attend(q, 0, batch, 0, 1.0, window)
    with pytest.raises(ValueError, match="softcap"):
        ops.attend(q, 0, batch, 0, 1.0, None, -1.0)


def test_blocks_before_the_window_are_never_looked_at():
    ops, batch, q = small()
    with_window = ops.attend(q, 0, batch, 0, 1.0, 2).copy()
    tables = batch.block_tables[0].copy()
    tables[0, 0] = -7  # freed: rows at 17 to 19 with a window of 2 see 16 and above
    assert np.array_equal(ops.attend(q, 0, replace(batch, block_tables=(tables,)), 0, 1.0, 2), with_window)
    with pytest.raises(IndexError):
        ops.attend(q, 0, replace(batch, block_tables=(tables,)), 0, 1.0, 3)


def test_rope_kv_write_refuses_bad_arguments():
    ops, batch, _ = small()
    qkv = np.zeros((4, 8 * 16), np.float32)
    rope = ops.rope_table(RopeConfig(dim=16), 32)
    ops.rope_kv_write(qkv, rope, 0, batch, 0, 4)
    slots = batch.slot_mapping[0]
    bad_slots = [np.where(np.arange(4) == 3, value, slots) for value in (-1, 8 * 16, 2**62)] + [slots[:3], slots.astype(np.int32)]
    bad_batches = [replace(batch, slot_mapping=(bad,)) for bad in bad_slots]
    bad_batches += [replace(batch, positions=bad) for bad in (batch.positions + 32, batch.positions - 30, batch.positions[:3])]
    for bad in bad_batches:
        with pytest.raises((ValueError, IndexError, TypeError)):
            ops.rope_kv_write(qkv, rope, 0, bad, 0, 4)
    for heads in (0, -4, 3, 5, 1 << 40):
        with pytest.raises(ValueError):
            ops.rope_kv_write(qkv, rope, 0, batch, 0, heads)
    with pytest.raises(ValueError, match="wider"):
        ops.rope_kv_write(qkv, ops.rope_table(RopeConfig(dim=18), 32), 0, batch, 0, 4)
    with pytest.raises(IndexError, match="layer"):
        ops.rope_kv_write(qkv, rope, 2, batch, 0, 4)


def test_import_and_export_refuse_bad_arguments():
    ops, batch, _ = small()
    kv = batch.kv[0]
    values = ops.export_block(kv, 7)
    assert values.shape == (2, 2, 2, 16, 16) and not values.any()  # untouched memory is zero
    for block in (-1, 8, 2**40):
        with pytest.raises(IndexError):
            ops.export_block(kv, block)
        with pytest.raises(IndexError):
            ops.import_block(kv, block, values)
    for bad in (values[:1], values[0], values[..., :8]):
        with pytest.raises((ValueError, TypeError)):
            ops.import_block(kv, 0, bad)


def test_no_rows():
    ops, batch, _ = small()
    empty = make_batch(np.random.default_rng(0), [], KVSpec(2, 8, 16, 2, 16, "bf16"), batch.kv[0])
    rope = ops.rope_table(RopeConfig(dim=16), 32)
    assert ops.rope_kv_write(np.zeros((0, 128), np.float32), rope, 0, empty, 0, 4).shape == (0, 4, 16)
    assert ops.attend(np.zeros((0, 4, 16), np.float32), 0, empty, 0, 1.0).shape == (0, 64)
