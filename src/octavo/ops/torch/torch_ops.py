"""TorchOps: the same ops on any device torch drives. Thin, and experimental until measured on one.

Owner: it owns its arena (one torch buffer per chunk) and the weights it packed: float32 on the CPU, bfloat16 elsewhere.
Semantics are those of ops/reference; agreement is within the tolerance of docs/numerics.md, not bit for bit, and it is
not batch-invariant. On the CPU torch's thread pool should be kept small (OMP_NUM_THREADS) beside other pools.
Not here: attention and the KV pool (attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.model_config import RopeConfig
from octavo.ops import layout
from octavo.ops.api import ForwardBatch, KVSpec, OpNeeds, PackedTensor
from octavo.ops.arena import Arena, Shape
from octavo.ops.needs import common_reasons
from octavo.ops.rope import rope_cos_sin
from octavo.ops.torch import attention
from octavo.ops.torch.attention import TorchBatch, TorchKV


@dataclass(frozen=True, slots=True)
class TorchWeight:
    """A matrix [N, K] in the device's weight dtype and its float32 bias [N]."""

    matrix: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class RopeTable:
    """float32 [max_position, dim / 2] each."""

    cos: Tensor
    sin: Tensor


class TorchOps:
    """Implements `octavo.ops.api.Ops`. Raises ConfigError for a device torch does not have."""

    name = "torch"
    sampling_kernels = None

    def __init__(self, capacity_rows: int, device: str = "cpu") -> None:
        self.device = _checked_device(device)
        self._weight_dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.arena = Arena(capacity_rows, allocate=self._buffer, view=_view)

    # -- what can it do ------------------------------------------------------------------------------------------
    def supports(self, op: str, needs: OpNeeds) -> list[str]:
        return common_reasons(op, needs)

    def replayer(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)
        return {"backend": self.name, "device": str(self.device), "device_name": name, "torch": torch.__version__,
                "threads": torch.get_num_threads(), "weights": str(self._weight_dtype).removeprefix("torch.")}  # fmt: skip

    # -- weights, once at load -----------------------------------------------------------------------------------
    def pack_linear(self, parts: Sequence[PackedTensor], bias: npt.NDArray[np.float32] | None = None) -> TorchWeight:
        matrix = torch.from_numpy(layout.stack_rows(parts)).to(self.device, self._weight_dtype)
        if bias is not None and bias.shape != (matrix.shape[0],):
            raise ValueError(f"bias has shape {bias.shape}, the weight {matrix.shape[0]} rows")
        return TorchWeight(matrix, None if bias is None else self.pack_vector(bias))

    def pack_vector(self, values: npt.NDArray[np.float32]) -> Tensor:
        return torch.tensor(np.asarray(values, np.float32), device=self.device)

    def rope_table(self, rope: RopeConfig, max_position: int) -> RopeTable:
        cos, sin = rope_cos_sin(rope, max_position)
        return RopeTable(torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device))

    # -- a step --------------------------------------------------------------------------------------------------
    def begin_step(self, num_rows: int) -> None:
        self.arena.reset()
        self.arena.reserve_rows(num_rows)

    def to_device(self, batch: ForwardBatch) -> TorchBatch:
        return attention.batch_to_device(batch, self.device)

    def to_numpy(self, x: Tensor) -> npt.NDArray[Any]:
        return x.cpu().numpy()

    def embedding(self, token_ids: Tensor, weight: TorchWeight) -> Tensor:
        out = self._take(token_ids.shape[0], weight.matrix.shape[1])
        return out.copy_(weight.matrix.index_select(0, token_ids))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = self._take(x.shape[0], x.shape[1])
        mean_square = x.square().mean(dim=-1, keepdim=True)
        mean_square.masked_fill_(mean_square.isinf(), float("nan"))
        torch.mul(x, torch.rsqrt(mean_square + eps), out=out)
        return out.mul_(weight)

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.add_(x, y)
        return self.rms_norm(x, weight, eps)

    def add_(self, x: Tensor, y: Tensor) -> None:
        x.add_(y)

    def linear(self, x: Tensor, weight: TorchWeight, num_generated: int) -> Tensor:
        # Both kinds of row use the same arithmetic here.
        out = self._take(x.shape[0], weight.matrix.shape[0])
        if self._weight_dtype == torch.float32:
            torch.mm(x, weight.matrix.T, out=out)
        else:
            out.copy_(torch.mm(x.to(self._weight_dtype), weight.matrix.T))
        return out if weight.bias is None else out.add_(weight.bias)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[1] // 2
        out = self._take(gate_up.shape[0], half)
        return torch.mul(torch.nn.functional.silu(gate_up[:, :half]), gate_up[:, half:], out=out)

    def rope_kv_write(self, qkv: Tensor, rope: RopeTable, layer: int, batch: TorchBatch, group: int, num_heads: int) -> Tensor:
        kv: TorchKV = batch.kv[group]
        dim, num_kv_heads = kv.spec.head_dim, kv.spec.num_kv_heads
        heads = qkv.reshape(qkv.shape[0], num_heads + 2 * num_kv_heads, dim)
        cos = rope.cos.index_select(0, batch.positions).unsqueeze(1)
        sin = rope.sin.index_select(0, batch.positions).unsqueeze(1)
        k = attention.rotate(heads[:, num_heads : num_heads + num_kv_heads], cos, sin)
        kv.write(layer, batch.slot_mapping[group], k, heads[:, num_heads + num_kv_heads :])
        out: Tensor = self.arena.take(heads.shape[0], (num_heads, dim), torch.float32)
        return out.copy_(attention.rotate(heads[:, :num_heads], cos, sin))

    def attend(
        self, q: Tensor, layer: int, batch: TorchBatch, group: int, scale: float, window: int | None = None, softcap: float = 0.0
    ) -> Tensor:
        out: Tensor = self.arena.take(q.shape[0], tuple(q.shape[1:]), torch.float32)
        attention.attend(q, batch.kv[group], layer, batch, group, scale, window, softcap, out)
        return out.reshape(q.shape[0], q.shape[1] * q.shape[2])

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        rows = torch.as_tensor(rows, device=self.device)
        return torch.index_select(x, 0, rows, out=self._take(rows.shape[0], x.shape[1]))

    # -- KV ------------------------------------------------------------------------------------------------------
    def kv_block_bytes(self, spec: KVSpec) -> int:
        return TorchKV.block_bytes(spec)

    def alloc_kv(self, spec: KVSpec) -> TorchKV:
        return TorchKV.allocate(spec, self.device)

    def copy_blocks(self, kv: TorchKV, sources: Sequence[int], targets: Sequence[int]) -> None:
        kv.copy(sources, targets)

    def export_block(self, kv: TorchKV, block: int) -> npt.NDArray[np.float32]:
        return kv.export_block(block).cpu().numpy().copy()

    def import_block(self, kv: TorchKV, block: int, values: npt.NDArray[np.float32]) -> None:
        kv.import_block(block, torch.as_tensor(values).to(self.device))

    def _take(self, rows: int, cols: int) -> Tensor:
        taken: Tensor = self.arena.take(rows, cols, torch.float32)
        return taken

    def _buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)  # torch aligns to 64 bytes or more


def _view(buffer: Tensor, offset: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return buffer[offset : offset + count * dtype.itemsize].view(dtype).view(shape)


def _checked_device(device: str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device it was built without
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"torch cannot use device {device!r}: {reason}") from error
    return found
