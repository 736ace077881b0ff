"""The first promise, op by op: a row's bits depend on the row, the weights and the instruction-set level, and on nothing else.

Every comparison is of bits. Whatever may differ between two runs of an engine is varied: rows beside a row, chunks of a prompt,
order of requests, placement of blocks, threads, and whether attention was divided by tiles or by splits.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.model_config import RopeConfig
from octavo.ops.api import KVSpec
from tests.ops.op_oracle import Segment, make_batch, random_packed

_native = pytest.importorskip("octavo._native", reason="the native module is not built")
CpuOps = pytest.importorskip("octavo.ops.cpu").CpuOps
LEVELS = _native.isa_levels()
LAYOUTS = ["q4_b32", "q8_b32", "q8_b16", "f32", "f16", "bf16"]
THREADS = (1, 2, 3)


@pytest.fixture(scope="module")
def backends():
    """isa -> CpuOps with 1, 2 and 3 threads, more than this machine may have."""
    return {isa: [CpuOps(96, threads=n, isa=isa, oversubscribe=True) for n in THREADS] for isa in LEVELS}


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(bits(a), bits(b))


def fresh(ops, rows: int):
    ops.begin_step(rows)
    return ops


def random_rows(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    return (rng.standard_normal((rows, cols)) * 10.0 ** rng.uniform(-2, 2, (rows, 1))).astype(np.float32)


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3), rows=st.integers(1, 70),
    n=st.integers(1, 150), blocks=st.integers(1, 9), offset=st.booleans(), zero=st.sampled_from([0, 8]), cut=st.integers(0, 70),
)  # fmt: skip
def test_linear(backends, isa, seed, layouts, rows, n, blocks, offset, zero, cut):
    rng = np.random.default_rng(seed)
    parts = [random_packed(rng, x, n, 32 * blocks, offset=offset and x[0] == "q", zero=zero if x[0] == "q" else 0)[0] for x in layouts]
    bias = rng.standard_normal(n * len(layouts)).astype(np.float32)
    x = random_rows(rng, rows, 32 * blocks)
    cut = min(cut, rows)
    whole = None
    for ops in backends[isa]:
        weight = ops.pack_linear(parts, bias)
        result = fresh(ops, rows).linear(x, weight, cut).copy()
        whole = result if whole is None else whole
        assert same(result, whole), "the number of threads changed bits"
        t = int(rng.integers(rows))
        assert same(fresh(ops, 1).linear(x[t : t + 1], weight, int(t < cut)), whole[t : t + 1]), "alone and in company differ"
        pieces = [fresh(ops, len(p)).linear(p, weight, len(p) * generated).copy() for p, generated in ((x[:cut], 1), (x[cut:], 0))]
        assert same(np.concatenate(pieces), whole), "chunks changed bits"
        order = np.concatenate([rng.permutation(cut), cut + rng.permutation(rows - cut)])
        assert same(fresh(ops, rows).linear(x[order], weight, cut), whole[order]), "the order of rows changed bits"
    columns = fresh(backends[isa][0], rows).linear(x, backends[isa][0].pack_linear(parts[:1], bias[:n]), cut)
    assert same(columns, whole[:, :n]), "fusing weights changed bits"


@pytest.mark.parametrize("isa", LEVELS)
def test_linear_over_more_rows_than_a_micro_batch(backends, isa):
    """Rows are quantised 512 at a time and dealt out 64 (in tiles: 256) at a time, generated and prompt rows apart."""
    rng = np.random.default_rng(0)
    packed, _ = random_packed(rng, "q4_b32", 40, 64, offset=True)
    x = random_rows(rng, 1100, 64)
    ops = backends[isa][2]
    weight = ops.pack_linear([packed])
    for generated in (0, 5, 70, 512, 600, 1100):
        whole = fresh(ops, 1100).linear(x, weight, generated).copy()
        for t in (0, 4, 5, 63, 64, 69, 70, 511, 512, 599, 600, 1023, 1024, 1099):
            assert same(fresh(ops, 1).linear(x[t : t + 1], weight, int(t < generated)), whole[t : t + 1])


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kind_of_a_row_matters_to_few_weights(backends, isa, layout):
    rng = np.random.default_rng(3)
    packed, _ = random_packed(rng, layout, 40, 96)
    x, ops = random_rows(rng, 6, 96), backends[isa][0]
    weight = ops.pack_linear([packed])
    prompt, generated = (fresh(ops, 6).linear(x, weight, n).copy() for n in (0, 6))
    assert same(prompt, generated) is (layout in ("f32", "f16") or (isa != "amx" and layout != "q4_b32"))


@pytest.mark.parametrize("layout", ["q4_b32", "bf16"])
@pytest.mark.parametrize("k", [512, 544, 1312])
def test_tiles_over_more_inputs_than_a_chunk(backends, layout, k):
    """Level amx dequantises 512 inputs at a time: a chunk's sums go on in the next, in pairs of panels and single ones."""
    if "amx" not in LEVELS:
        pytest.skip("this CPU has no AMX (native/tests/README.md tells how to emulate it)")
    rng = np.random.default_rng(k)
    (left, matrix), (right, _) = (random_packed(rng, layout, n, k) for n in (33, 40))
    x = random_rows(rng, 70, k)
    for ops in backends["amx"]:
        weight, both = ops.pack_linear([left]), ops.pack_linear([right, left])
        whole = fresh(ops, 70).linear(x, weight, 0).copy()
        exact = x.astype(np.float64) @ matrix.T
        assert (np.abs(whole - exact) <= 2.0**-7 * (np.abs(x) @ np.abs(matrix).T)).all()
        assert same(fresh(ops, 70).linear(x, both, 0)[:, 40:], whole)
        for t in (0, 15, 16, 69):
            assert same(fresh(ops, 1).linear(x[t : t + 1], weight, 0), whole[t : t + 1])


def test_generated_rows_of_level_amx_have_the_bits_of_avx512():
    """Tiles are for prompt rows alone; everything else is the other level's."""
    if "amx" not in LEVELS:
        pytest.skip("this CPU has no AMX (native/tests/README.md tells how to emulate it)")
    results = []
    for isa in ("avx512vnni", "amx"):
        ops, rng, mine = CpuOps(64, threads=2, isa=isa), np.random.default_rng(11), []
        for layout in LAYOUTS:
            packed, _ = random_packed(rng, layout, 45, 96, offset=layout[0] == "q", zero=8 if layout[0] == "q" else 0)
            mine.append(fresh(ops, 21).linear(random_rows(rng, 21, 96), ops.pack_linear([packed]), 13)[:13].copy())
        x = random_rows(rng, 5, 90)
        mine += [fresh(ops, 5).rms_norm(x, x[0], 1e-5).copy(), ops.silu_mul(x).copy()]
        spec = KVSpec(1, 60, 16, 2, 20, "bf16")
        mine += forward(ops, spec, 6, [[(0, 300)]], [Sequence(rng, 300, 6, 2, 20)], rng, None, 6.0)
        results.append(mine)
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 70), cols=st.integers(1, 700))
def test_row_wise_ops(backends, isa, seed, rows, cols):
    rng = np.random.default_rng(seed)
    x, y, weight = random_rows(rng, rows, 2 * cols), random_rows(rng, rows, 2 * cols), random_rows(rng, 1, 2 * cols)[0]
    results = []
    for ops in backends[isa]:
        fresh(ops, rows)
        total = x.copy()
        ops.add_(total, y)
        results.append([ops.rms_norm(x, weight, 1e-5).copy(), ops.silu_mul(x).copy(), total])
        t = int(rng.integers(rows))
        alone = x[t : t + 1].copy()
        assert same(ops.rms_norm(alone, weight, 1e-5), results[0][0][t : t + 1])
        assert same(ops.silu_mul(alone), results[0][1][t : t + 1])
        ops.add_(alone, y[t : t + 1])
        assert same(alone, results[0][2][t : t + 1])
    for other in results[1:]:
        assert all(same(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), cols=st.integers(1, 70), at=st.integers(0, 69))
def test_a_column_has_no_favourite_place(backends, isa, seed, cols, at):
    """Body and tail of a row take the same path: an element-wise result does not depend on where it stands."""
    rng = np.random.default_rng(seed)
    at = min(at, cols - 1)
    gate, up = random_rows(rng, 1, cols), random_rows(rng, 1, cols)
    ops = fresh(backends[isa][0], 1)
    whole = ops.silu_mul(np.concatenate([gate, up], axis=1))
    one = ops.silu_mul(np.array([[gate[0, at], up[0, at]]], np.float32))
    assert same(one[0], whole[0, at : at + 1])


class Sequence:
    """One request's activations: qkv rows of every position, and what attention gives when they go in one at a time."""

    def __init__(self, rng: np.random.Generator, length: int, heads: int, kv_heads: int, dim: int) -> None:
        self.qkv = random_rows(rng, length, (heads + 2 * kv_heads) * dim)
        self.length = length


def forward(ops, spec: KVSpec, heads: int, steps, sequences, rng, window, softcap) -> list[np.ndarray]:
    """Runs `steps`, lists of (sequence, rows), each one batch; the attention rows of every sequence in order. Blocks lie where
    `rng` puts them; each step leaves its sequences' blocks in place for the next."""
    kv = ops.alloc_kv(spec)
    rope = ops.rope_table(RopeConfig(dim=spec.head_dim), 1024)
    free = iter(rng.permutation(spec.num_blocks).tolist())
    width = -(-max(s.length for s in sequences) // 16)
    tables = np.array([[next(free) if i * 16 < s.length else -1 for i in range(width)] for s in sequences], np.int32)
    done, out = [0] * len(sequences), [[] for _ in sequences]
    for step in steps:
        segments = [Segment(rows, done[i] + rows) for i, rows in step]
        batch = make_batch(rng, segments, spec, kv)
        which = np.repeat([i for i, _ in step], [rows for _, rows in step])
        batch.block_tables = (tables[[i for i, _ in step]],)
        batch.slot_mapping = (tables[which, batch.positions // 16].astype(np.int64) * 16 + batch.positions % 16,)
        qkv = np.concatenate([sequences[i].qkv[done[i] : done[i] + rows] for i, rows in step])
        fresh(ops, len(qkv))
        q = ops.rope_kv_write(qkv, rope, 0, batch, 0, heads)
        result = ops.attend(q, 0, batch, 0, 0.2, window, softcap)
        for s, (i, rows) in enumerate(step):
            start = batch.query_start_loc[s]
            out[i].append(result[start : start + rows].copy())
            done[i] += rows
    return [np.concatenate(pieces) for pieces in out]


def random_steps(draw, lengths: list[int]) -> list[list[tuple[int, int]]]:
    """A schedule that hands out every row: chunks of any size, any subset of sequences in any order in a step."""
    left, steps = list(lengths), []
    while any(left):
        alive = draw(st.permutations([i for i, n in enumerate(left) if n]))
        chosen = alive[: draw(st.integers(1, len(alive)))]
        step = [(i, draw(st.integers(1, min(left[i], 70)))) for i in chosen]
        for i, rows in step:
            left[i] -= rows
        steps.append(step)
    return steps


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_attention(backends, isa, data):
    """Whole prompts against any schedule, on other blocks, with other threads, in every KV dtype."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kv_heads, group, dim = draw(st.sampled_from([(1, 1, 16), (3, 3, 16), (1, 9, 8), (2, 1, 10)]))
    window, softcap = draw(st.sampled_from([None, None, 1, 7, 40, 260])), draw(st.sampled_from([0.0, 0.0, 5.0]))
    spec = KVSpec(1, 120, 16, kv_heads, dim, draw(st.sampled_from(["bf16", "f16", "f32", "int8"])))
    heads = kv_heads * group
    sequences = [Sequence(rng, draw(st.integers(1, 90)), heads, kv_heads, dim) for _ in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        sequences.append(Sequence(rng, draw(st.integers(250, 560)), heads, kv_heads, dim))
    alone = [forward(backends[isa][0], spec, heads, [[(0, s.length)]], [s], rng, window, softcap)[0] for s in sequences]
    steps = random_steps(draw, [s.length for s in sequences])
    ops = backends[isa][draw(st.integers(0, 2))]
    for one, together in zip(alone, forward(ops, spec, heads, steps, sequences, rng, window, softcap), strict=True):
        assert same(one, together)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("window", [None, 300, 700])
def test_attention_by_tiles_and_by_splits(backends, isa, window):
    """One row of a long context is divided by splits when there are threads to spare, by tiles in a crowd or on one thread."""
    rng = np.random.default_rng(0)
    spec = KVSpec(1, 140, 16, 1, 16, "bf16")
    long = Sequence(rng, 1000, 4, 1, 16)
    crowd = [Sequence(rng, 17, 4, 1, 16) for _ in range(20)]
    results = []
    for ops in backends[isa]:
        results.append(forward(ops, spec, 4, [[(0, 999)], [(0, 1)]], [long], np.random.default_rng(1), window, 0.0)[0])
        steps = [[(0, 999)], [*((i + 1, 17) for i in range(20)), (0, 1)]]
        results.append(forward(ops, spec, 4, steps, [long, *crowd], np.random.default_rng(2), window, 0.0)[0])
    assert all(same(results[0], other) for other in results[1:])


def test_levels_with_fused_arithmetic_agree():
    """AVX2 and AVX-512 compute the same sequence of operations, so their bits are equal too; checked where both can run."""
    if "avx512vnni" not in LEVELS:
        pytest.skip("this CPU has no AVX-512 VNNI (native/tests/README.md tells how to emulate it)")
    rng = np.random.default_rng(0)
    results = []
    for isa in ("avx2", "avx512vnni"):
        ops, local, mine = CpuOps(64, threads=2, isa=isa), np.random.default_rng(7), []
        for layout in LAYOUTS:
            packed, _ = random_packed(local, layout, 45, 96, offset=layout[0] == "q", zero=8 if layout[0] == "q" else 0)
            weight, x = ops.pack_linear([packed]), random_rows(local, 13, 96)
            for rows in (1, 2, 4, 8, 13):
                mine.append(fresh(ops, rows).linear(x[:rows], weight, rows // 2).copy())
        x = random_rows(local, 5, 90)
        fresh(ops, 5)
        mine += [ops.rms_norm(x, x[0], 1e-5).copy(), ops.silu_mul(x).copy()]
        for dtype in ("bf16", "f16", "f32", "int8"):
            spec = KVSpec(1, 60, 16, 2, 20, dtype)
            sequences = [Sequence(local, 300, 6, 2, 20), Sequence(local, 33, 6, 2, 20)]
            mine += forward(ops, spec, 6, [[(0, 300), (1, 33)]], sequences, rng, None, 6.0)
        results.append(mine)
    assert all(same(a, b) for a, b in zip(*results, strict=True))
