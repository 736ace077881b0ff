"""CpuOps: the `Ops` protocol on NumPy arrays, by the native kernels in native/.

Owner: it owns its arena, its thread pool (inside the native Context), and makes packed weights, rotary tables and KV pools,
which are opaque native handles. Every check of shapes, strides and indices is made in the native module, so that no
caller can reach memory that is not its own.
Numerics: docs/numerics.md. A row's bits depend on the row, the weights and the instruction-set level only.
Not here: arithmetic (native/src/kernels), the choice of backend (ops/registry.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.errors import ConfigError
from octavo.model_config import RopeConfig
from octavo.ops.api import ForwardBatch, KVSpec, OpNeeds, PackedTensor
from octavo.ops.arena import Arena
from octavo.ops.cpu.replay import StepReplayer
from octavo.ops.layout import NIBBLES
from octavo.ops.needs import common_reasons
from octavo.ops.rope import rope_cos_sin

#: Tokens of a KV block: the kernels' tiles have this size.
BLOCK_SIZE = 16
_KV_OPS = frozenset({"rope_table", "rope_kv_write", "attend", "kv_block_bytes", "alloc_kv", "copy_blocks", "export_block", "import_block"})
Float32Array = npt.NDArray[np.float32]


class CpuOps:
    """Native kernels on NumPy arrays (see `Ops` in ops/api.py for each method's contract).

    capacity_rows: rows the arena reserves room for (it grows when a step has more).
    threads: 0 takes what affinity and control groups allow; more than that is cut down to it, unless `oversubscribe`.
    isa: "portable", "avx2", "avx512vnni" or "amx"; None takes OCTAVO_CPU_ISA, else the strongest this machine has, but for "amx".
    Raises ConfigError for a level this machine cannot run, or a negative number of threads.
    """

    name = "cpu"

    def __init__(self, capacity_rows: int = 512, threads: int = 0, *, isa: str | None = None, oversubscribe: bool = False) -> None:
        if threads < 0:
            raise ConfigError(f"threads must be 0 or a positive integer, got {threads}")
        available = _native.available_threads()
        chosen = threads if threads and (oversubscribe or threads < available) else available
        try:
            self._context = _native.Context(chosen, isa or "")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.arena = Arena(capacity_rows)
        self.sampling_kernels = self._context

    # -- what can it do ------------------------------------------------------------------------------------------
    def supports(self, op: str, needs: OpNeeds) -> list[str]:
        """What no backend can do (ops/needs.py), and the limits of the KV kernels."""
        reasons = common_reasons(op, needs)
        return reasons + _kv_limits(needs) if op in _KV_OPS else reasons

    def replayer(self) -> StepReplayer:
        return StepReplayer(self._context, self.arena, self._swap_context)

    def _swap_context(self, context: Any) -> None:
        """`context` receives the calls of every op from now on."""
        self._context = context

    def describe(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "isa": self._context.isa,
            "isa_levels": _native.isa_levels(),
            "threads": self._context.threads,
            "available_threads": _native.available_threads(),
        }

    # -- weights, once at load -----------------------------------------------------------------------------------
    def pack_linear(self, parts: Sequence[PackedTensor], bias: Float32Array | None = None) -> _native.PackedWeight:
        """Repacks into panels of 16 columns, on all threads. ValueError or TypeError for parts that do not fit."""
        if not parts:
            raise ValueError("pack_linear needs at least one part")
        weight = _native.PackedWeight(parts[0].shape[1])
        for part in parts:
            self._pack_part(weight, part)
        if bias is not None:
            weight.set_bias(np.ascontiguousarray(bias, np.float32))
        return weight

    def _pack_part(self, weight: _native.PackedWeight, part: PackedTensor) -> None:
        n, k = part.shape
        data = _items(part.data) if part.data.ndim == 3 else _rows(part.data)
        if k != weight.k:
            raise ValueError(f"parts of a weight must have the same K, got {weight.k} and {k}")
        if data.shape[0] != n or data.size != n * (k // 2 if part.layout in NIBBLES else k):
            raise ValueError(f"data of layout {part.layout} and shape {part.shape} cannot be {part.data.shape}")
        scale = None if part.scale is None else _items(_bits(part.scale))
        offset = None if part.offset is None else _items(_bits(part.offset))
        self._context.pack_part(weight, part.layout, data, scale, offset, part.zero)

    def pack_vector(self, values: Float32Array) -> Float32Array:
        return np.array(values, np.float32, order="C")

    def rope_table(self, rope: RopeConfig, max_position: int) -> _native.RopeTable:
        return _native.RopeTable(*rope_cos_sin(rope, max_position))

    # -- a step --------------------------------------------------------------------------------------------------
    def begin_step(self, num_rows: int) -> None:
        self.arena.reset()
        self.arena.reserve_rows(num_rows)

    def to_device(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def to_numpy(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return x

    def embedding(self, token_ids: npt.NDArray[np.int32], weight: _native.PackedWeight) -> Float32Array:
        out: Float32Array = self.arena.take(len(token_ids), weight.k)
        self._context.embedding(token_ids, weight, out)
        return out

    def rms_norm(self, x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
        out: Float32Array = self.arena.take(x.shape[0], x.shape[1])
        self._context.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(self, x: Float32Array, y: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
        out: Float32Array = self.arena.take(x.shape[0], x.shape[1])
        self._context.add_rms_norm(x, y, weight, eps, out)
        return out

    def add_(self, x: Float32Array, y: Float32Array) -> None:
        self._context.add(x, y)

    def linear(self, x: Float32Array, weight: _native.PackedWeight, num_generated: int) -> Float32Array:
        """Float weights: float32. Quantised ones: activations rounded per block of 32, to 8 bits where generated rows meet 4-bit
        weights, else to 15. ValueError for num_generated outside [0, T]."""
        out: Float32Array = self.arena.take(x.shape[0], weight.columns)
        self._context.linear(x, weight, num_generated, out)
        return out

    def silu_mul(self, gate_up: Float32Array) -> Float32Array:
        out: Float32Array = self.arena.take(gate_up.shape[0], gate_up.shape[1] // 2)
        self._context.silu_mul(gate_up, out)
        return out

    def rope_kv_write(
        self, qkv: Float32Array, rope: _native.RopeTable, layer: int, batch: ForwardBatch, group: int, num_heads: int
    ) -> Float32Array:
        kv = batch.kv[group]
        if qkv.shape[1] != (num_heads + 2 * kv.kv_heads) * kv.head_dim:  # before room for q is taken
            raise ValueError(f"qkv has {qkv.shape[1]} columns, {num_heads} heads need {(num_heads + 2 * kv.kv_heads) * kv.head_dim}")
        q: Float32Array = self.arena.take(qkv.shape[0], (num_heads, kv.head_dim))
        self._context.rope_kv_write(qkv, rope, kv, layer, batch.positions, batch.slot_mapping[group], num_heads, q)
        return q

    def attend(
        self,
        q: Float32Array,
        layer: int,
        batch: ForwardBatch,
        group: int,
        scale: float,
        window: int | None = None,
        softcap: float = 0.0,
    ) -> Float32Array:
        rows, heads, dim = q.shape
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        out: Float32Array = self.arena.take(rows, heads * dim)
        self._context.attend(
            q, batch.kv[group], layer, batch.positions, batch.query_start_loc, batch.block_tables[group], scale, window or 0, softcap, out
        )
        return out

    def take_rows(self, x: Float32Array, rows: npt.NDArray[np.int32]) -> Float32Array:
        out: Float32Array = self.arena.take(len(rows), x.shape[1])
        self._context.take_rows(x, rows, out)
        return out

    # -- KV ------------------------------------------------------------------------------------------------------
    def kv_block_bytes(self, spec: KVSpec) -> int:
        _check_block_size(spec.block_size)
        return int(_native.KvPool.block_bytes(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.dtype))

    def alloc_kv(self, spec: KVSpec) -> _native.KvPool:
        """MemoryError when the system refuses the reservation; ConfigError for shapes without a kernel."""
        _check_block_size(spec.block_size)
        try:
            return _native.KvPool(spec.num_layers, spec.num_blocks, spec.num_kv_heads, spec.head_dim, spec.dtype)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def copy_blocks(self, kv: _native.KvPool, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._context.copy_blocks(kv, np.asarray(sources, np.int64), np.asarray(targets, np.int64))

    def export_block(self, kv: _native.KvPool, block: int) -> Float32Array:
        values = np.empty((kv.layers, 2, kv.kv_heads, BLOCK_SIZE, kv.head_dim), np.float32)
        kv.export_block(block, values)
        return values

    def import_block(self, kv: _native.KvPool, block: int, values: Float32Array) -> None:
        kv.import_block(block, np.ascontiguousarray(values, np.float32))


def _kv_limits(needs: OpNeeds) -> list[str]:
    reasons = []
    if needs.block_size != BLOCK_SIZE:
        reasons.append(f"KV blocks must hold {BLOCK_SIZE} tokens, not {needs.block_size}")
    if needs.head_dim % 2 or not 8 <= needs.head_dim <= 256:
        reasons.append(f"head size must be even and between 8 and 256, not {needs.head_dim}")
    return reasons


def _check_block_size(block_size: int) -> None:
    if block_size != BLOCK_SIZE:
        raise ConfigError(f"block_size must be {BLOCK_SIZE} with --backend cpu, got {block_size}")


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Halves as uint16: the native module takes their bits."""
    return values.view(np.uint16) if values.dtype == np.float16 else values


def _strided(values: npt.NDArray[Any]) -> bool:
    """Whether the native module can read it where it lies: aligned, and a whole number of items from one to the next."""
    return bool(values.flags.aligned) and all(stride % values.itemsize == 0 for stride in values.strides)


def _items(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values if _strided(values) else values.copy()


def _rows(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array itself where its rows are contiguous and aligned, else a copy: files promise neither."""
    contiguous = values.ndim == 2 and (values.shape[1] <= 1 or values.strides[1] == values.itemsize)
    whole = values.ndim == 2 and values.strides[0] % values.itemsize == 0
    return values if contiguous and whole and values.flags.aligned else values.copy()
