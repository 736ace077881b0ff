"""Native row-wise ops: against float64, at the ends of exp, and with hostile arguments."""

from __future__ import annotations

import numpy as np
import pytest

_native = pytest.importorskip("octavo._native", reason="the native module is not built")
CpuOps = pytest.importorskip("octavo.ops.cpu").CpuOps
LEVELS = _native.isa_levels()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 576, 1000])
def test_rms_norm(isa, n):
    rng = np.random.default_rng(n)
    ops = CpuOps(16, threads=2, isa=isa)
    weight = ops.pack_vector(rng.standard_normal(n).astype(np.float32))
    x = (rng.standard_normal((9, n)) * np.float32(10) ** rng.integers(-4, 5, (9, 1))).astype(np.float32)
    ops.begin_step(9)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert np.allclose(ops.rms_norm(x, weight, 1e-5), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("isa", LEVELS)
def test_silu_over_the_whole_range(isa):
    """exp is a polynomial of our own: every region of it, both ends, and what is not a number."""
    wide = np.geomspace(1e-30, 2e38, 500)
    gate = np.concatenate([np.linspace(-100, 100, 20011), wide, -wide]).astype(np.float32)
    up = np.full_like(gate, 1.5)
    ops = CpuOps(1, threads=1, isa=isa)
    ops.begin_step(1)
    result = ops.silu_mul(np.concatenate([gate, up])[None])[0]
    with np.errstate(over="ignore"):
        expected = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * 1.5
    assert (np.abs(result - expected) <= 1e-6 * np.abs(expected) + 1e-35).all()
    special = np.array([[np.inf, -np.inf, np.nan, 0.0, -0.0, 1, 1, 1, 1, 1]], np.float32)
    ops.begin_step(1)
    special_result = ops.silu_mul(special)[0]
    assert special_result[0] == np.inf and np.isnan(special_result[2]) and not special_result[3:].any()


@pytest.mark.parametrize("isa", LEVELS)
def test_arrays_may_have_row_strides(isa):
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((7, 100)).astype(np.float32)
    x, y = wide[:, 3:40], wide[::-1, 50:87]
    ops = CpuOps(8, threads=1, isa=isa)
    weight = np.ones(37, np.float32)
    ops.begin_step(7)
    assert np.array_equal(ops.rms_norm(x, weight, 1e-5), ops.rms_norm(x.copy(), weight, 1e-5))
    assert np.array_equal(ops.take_rows(x, np.array([6, 0, 6], np.int32)), x[[6, 0, 6]])
    before, rest = x + y, wide[:, 40:50].copy()
    ops.add_(x, y)
    assert np.array_equal(x, before) and np.array_equal(wide[:, 40:50], rest)


def test_no_rows():
    ops = CpuOps(8, threads=2)
    empty = np.zeros((0, 32), np.float32)
    assert ops.rms_norm(empty, np.ones(32, np.float32), 1e-5).shape == (0, 32)
    assert ops.silu_mul(empty).shape == (0, 16)
    assert ops.take_rows(empty, np.zeros(0, np.int32)).shape == (0, 32)
    ops.add_(empty, empty)


def test_outputs_come_from_the_arena():
    ops = CpuOps(8, threads=1)
    x, weight = np.ones((3, 32), np.float32), np.ones(32, np.float32)
    ops.begin_step(3)
    first = ops.rms_norm(x, weight, 1e-5)
    with ops.arena.scope():
        inside = ops.silu_mul(x)
    again = ops.silu_mul(x)
    assert again.ctypes.data == inside.ctypes.data != first.ctypes.data
    ops.begin_step(1)
    assert ops.rms_norm(x[:1], weight, 1e-5).ctypes.data == first.ctypes.data


@pytest.mark.parametrize(
    "call",
    [
        lambda ops, x: ops.rms_norm(x, np.ones(31, np.float32), 1e-5),
        lambda ops, x: ops.rms_norm(x, np.ones((32, 1), np.float32), 1e-5),
        lambda ops, x: ops.rms_norm(x, np.ones(64, np.float32)[::2], 1e-5),
        lambda ops, x: ops.rms_norm(x, np.ones(32, np.float64), 1e-5),
        lambda ops, x: ops.rms_norm(x.astype(np.float16), np.ones(32, np.float32), 1e-5),
        lambda ops, x: ops.rms_norm(np.zeros((3, 0), np.float32), np.ones(0, np.float32), 1e-5),
        lambda ops, x: ops.add_(x, x[:2]),
        lambda ops, x: ops.add_rms_norm(x, x[:2], np.ones(x.shape[1], np.float32), 1e-5),
        lambda ops, x: ops.add_rms_norm(x, x.copy(), np.ones(x.shape[1] - 1, np.float32), 1e-5),
        lambda ops, x: ops.add_rms_norm(np.broadcast_to(x[:1], x.shape), x, np.ones(x.shape[1], np.float32), 1e-5),
        lambda ops, x: ops.add_(x, x[:, :31]),
        lambda ops, x: ops.add_(np.broadcast_to(x[:1], x.shape), x),
        lambda ops, x: ops.silu_mul(x[:, :31]),
        lambda ops, x: ops.take_rows(x, np.array([3], np.int32)),
        lambda ops, x: ops.take_rows(x, np.array([-1], np.int32)),
        lambda ops, x: ops.take_rows(x, np.array([0], np.int64)),
        lambda ops, x: ops.take_rows(x, np.array([[0]], np.int32)),
        lambda ops, x: ops.silu_mul(np.frombuffer(bytes(1 + x.nbytes), np.uint8)[1:].view(np.float32).reshape(x.shape)),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call):
    ops = CpuOps(8, threads=1)
    ops.begin_step(3)
    with pytest.raises((ValueError, TypeError, IndexError)):
        call(ops, np.ones((3, 32), np.float32))


def test_denormals_survive_whatever_the_calling_thread_was_told():
    """A library may set the processor to flush them; the workers would not, and bits would depend on who took a row."""
    torch = pytest.importorskip("torch")
    x = np.full((64, 8192), 1e-40, np.float32)
    expected = x + x  # before the thread is told: afterwards NumPy would give zeros
    assert expected.any() and torch.set_flush_denormal(True)
    try:
        for threads in (1, 2):
            ops = CpuOps(64, threads=threads, oversubscribe=True)
            total = x.copy()
            ops.add_(total, x)
            assert (torch.tensor([1e-40]) + 0).item() == 0  # the thread is still told to
            np.testing.assert_array_equal(total.view(np.uint32), expected.view(np.uint32))
    finally:
        torch.set_flush_denormal(False)


def test_a_weight_without_columns_is_refused():
    with pytest.raises(ValueError, match="no columns"):
        _native.Context(1, "").linear(np.zeros((1, 8), np.float32), _native.PackedWeight(8), 0, np.zeros((1, 0), np.float32))
