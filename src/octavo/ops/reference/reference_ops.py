"""ReferenceOps: every op in NumPy float32. It is the specification, so it is written to be read, not to be fast.

Owner: it owns its arena and the weights it packed (kept as dequantised float32). Results agree with float64 within the
tolerances of docs/numerics.md but are not batch-invariant: BLAS picks its own order of summation by shape.
Not here: attention and the KV pool (attention.py), dequantising (ops/layout.py), choice of backend (ops/registry.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.model_config import RopeConfig
from octavo.ops import layout
from octavo.ops.api import ForwardBatch, KVSpec, OpNeeds, PackedTensor
from octavo.ops.arena import Arena
from octavo.ops.needs import common_reasons
from octavo.ops.reference import attention
from octavo.ops.reference.attention import ReferenceKV
from octavo.ops.rope import rope_cos_sin

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """A matrix [N, K] and its bias [N], both float32."""

    matrix: Float32Array
    bias: Float32Array | None


@dataclass(frozen=True, slots=True)
class RopeTable:
    """float32 [max_position, dim / 2] each."""

    cos: Float32Array
    sin: Float32Array


class ReferenceOps:
    """Implements `octavo.ops.api.Ops`, whose docstrings say what each op means."""

    name = "reference"
    sampling_kernels = None

    def __init__(self, capacity_rows: int, arena: Arena | None = None) -> None:
        #: May be given, to share one arena with the backend it runs beside (ops/registry.py).
        self.arena = arena or Arena(capacity_rows)

    # -- what can it do ------------------------------------------------------------------------------------------
    def supports(self, op: str, needs: OpNeeds) -> list[str]:
        return common_reasons(op, needs)

    def replayer(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"backend": self.name, "device": "cpu", "numpy": np.__version__}

    # -- weights, once at load -----------------------------------------------------------------------------------
    def pack_linear(self, parts: Sequence[PackedTensor], bias: Float32Array | None = None) -> ReferenceWeight:
        matrix = layout.stack_rows(parts)
        if bias is not None and bias.shape != (matrix.shape[0],):
            raise ValueError(f"bias has shape {bias.shape}, the weight {matrix.shape[0]} rows")
        return ReferenceWeight(matrix, None if bias is None else np.array(bias, np.float32))

    def pack_vector(self, values: Float32Array) -> Float32Array:
        return np.array(values, np.float32)

    def rope_table(self, rope: RopeConfig, max_position: int) -> RopeTable:
        return RopeTable(*rope_cos_sin(rope, max_position))

    # -- a step --------------------------------------------------------------------------------------------------
    def begin_step(self, num_rows: int) -> None:
        self.arena.reset()
        self.arena.reserve_rows(num_rows)

    def to_device(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def to_numpy(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return x

    def embedding(self, token_ids: npt.NDArray[np.int32], weight: ReferenceWeight) -> Float32Array:
        return self.take_rows(weight.matrix, token_ids)

    def rms_norm(self, x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
        out = self._take(x.shape[0], x.shape[1])
        with np.errstate(over="ignore"):
            mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        mean_square[np.isinf(mean_square)] = np.nan
        np.divide(x, np.sqrt(mean_square + np.float32(eps)), out=out)
        out *= weight
        return out

    def add_rms_norm(self, x: Float32Array, y: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
        self.add_(x, y)
        return self.rms_norm(x, weight, eps)

    def add_(self, x: Float32Array, y: Float32Array) -> None:
        x += y

    def linear(self, x: Float32Array, weight: ReferenceWeight, num_generated: int) -> Float32Array:
        # Both kinds of row use the same arithmetic here: float32.
        out = self._take(x.shape[0], weight.matrix.shape[0])
        np.matmul(x, weight.matrix.T, out=out)
        if weight.bias is not None:
            out += weight.bias
        return out

    def silu_mul(self, gate_up: Float32Array) -> Float32Array:
        half = gate_up.shape[1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
        out = self._take(gate.shape[0], half)
        with np.errstate(over="ignore"):  # exp(-gate) of a very negative gate is infinite, and gate / inf the right 0
            np.divide(gate, 1.0 + np.exp(-gate), out=out)
        out *= up
        return out

    def rope_kv_write(
        self, qkv: Float32Array, rope: RopeTable, layer: int, batch: ForwardBatch, group: int, num_heads: int
    ) -> Float32Array:
        kv: ReferenceKV = batch.kv[group]
        dim, num_kv_heads = kv.spec.head_dim, kv.spec.num_kv_heads
        heads = qkv.reshape(qkv.shape[0], num_heads + 2 * num_kv_heads, dim)
        cos, sin = rope.cos[batch.positions][:, None, :], rope.sin[batch.positions][:, None, :]
        k = attention.rotate(heads[:, num_heads : num_heads + num_kv_heads], cos, sin)
        kv.write(layer, batch.slot_mapping[group], k, heads[:, num_heads + num_kv_heads :])
        out: Float32Array = self.arena.take(heads.shape[0], (num_heads, dim))
        out[:] = attention.rotate(heads[:, :num_heads], cos, sin)
        return out

    def attend(
        self, q: Float32Array, layer: int, batch: ForwardBatch, group: int, scale: float, window: int | None = None, softcap: float = 0.0
    ) -> Float32Array:
        out: Float32Array = self.arena.take(q.shape[0], q.shape[1:])
        attention.attend(q, batch.kv[group], layer, batch, group, scale, window, softcap, out)
        return out.reshape(q.shape[0], q.shape[1] * q.shape[2])

    def take_rows(self, x: Float32Array, rows: npt.NDArray[np.int32]) -> Float32Array:
        out = self._take(rows.shape[0], x.shape[1])
        np.take(x, rows, axis=0, out=out)
        return out

    # -- KV ------------------------------------------------------------------------------------------------------
    def kv_block_bytes(self, spec: KVSpec) -> int:
        return ReferenceKV.block_bytes(spec)

    def alloc_kv(self, spec: KVSpec) -> ReferenceKV:
        return ReferenceKV.allocate(spec)

    def copy_blocks(self, kv: ReferenceKV, sources: Sequence[int], targets: Sequence[int]) -> None:
        kv.copy(sources, targets)

    def export_block(self, kv: ReferenceKV, block: int) -> Float32Array:
        return kv.pool[:, :, block].copy()

    def import_block(self, kv: ReferenceKV, block: int, values: Float32Array) -> None:
        kv.pool[:, :, block] = layout.round_to(values, kv.spec.dtype)

    def _take(self, rows: int, cols: int) -> Float32Array:
        taken: Float32Array = self.arena.take(rows, cols)
        return taken
