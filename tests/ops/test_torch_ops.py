"""What the matrix does not reach on a CPU: the bfloat16 weights that other devices get, and waiting for the device."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from octavo.ops.api import KVSpec  # noqa: E402
from octavo.ops.torch import TorchOps  # noqa: E402
from octavo.ops.torch.attention import TorchBatch  # noqa: E402
from tests.ops.op_oracle import Segment, bf16_round, make_batch, random_packed  # noqa: E402


def test_bfloat16_weights():
    """On the CPU device, with the weight type of the others."""
    rng = np.random.default_rng(0)
    ops = TorchOps(8)
    ops._weight_dtype = torch.bfloat16
    packed, matrix = random_packed(rng, "q8_b32", 40, 64)
    bias, x = rng.standard_normal(40).astype(np.float32), rng.standard_normal((5, 64)).astype(np.float32)
    weight = ops.pack_linear([packed], bias)
    assert weight.matrix.dtype == torch.bfloat16
    ops.begin_step(5)
    result = ops.linear(torch.from_numpy(x), weight, 2)
    assert result.dtype == torch.float32
    rounded = bf16_round(x) @ bf16_round(matrix).T
    np.testing.assert_allclose(result.numpy(), rounded + bias, rtol=0, atol=2.0**-8 * np.abs(rounded).max())
    rows = ops.embedding(torch.tensor([3, 39], dtype=torch.int32), weight)
    np.testing.assert_array_equal(rows.numpy(), bf16_round(matrix[[3, 39]]))


def test_the_plan_of_a_batch_is_made_once_on_the_host():
    """Layers must not read tensors back: on a device each such read waits for all work before it."""
    ops = TorchOps(8)
    spec = KVSpec(1, 20, 16, 1, 8, "bf16")
    kv = ops.alloc_kv(spec)
    assert kv.pool.dtype == torch.bfloat16
    batch = ops.to_device(make_batch(np.random.default_rng(0), [Segment(1, 40), Segment(3, 17), Segment(0, 4), Segment(1, 2)], spec, kv))
    assert isinstance(batch, TorchBatch) and isinstance(batch.block_tables[0], torch.Tensor)
    assert batch.long_segments == ((1, 4, 14, 1),)
    assert batch.single_rows.tolist() == [0, 4] and batch.single_segments.tolist() == [0, 3] and batch.longest_single == 40
