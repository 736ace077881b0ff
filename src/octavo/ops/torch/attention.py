"""Paged attention and its KV pool on a torch device.

Owner of the pool: whoever called alloc_kv; its layout is known to this file alone. It gathers the blocks of a segment:
thin and right, not fast. Not here: the other ops (torch_ops.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from octavo.ops.api import ForwardBatch, KVSpec

KV_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
#: Scores held at once: long prompts are attended in runs of rows.
_MAX_SCORES = 1 << 24


@dataclass(slots=True)
class TorchBatch(ForwardBatch):
    """A batch on the device that also remembers, on the host, what the loops need: reading it back would wait."""

    #: (first row, end row, position of the first row) of each segment of more than one row, with its index.
    long_segments: tuple[tuple[int, int, int, int], ...] = ()
    #: Rows, and segments, that are alone in their segment (decoding streams): attended together.
    single_rows: Tensor | None = None
    single_segments: Tensor | None = None
    #: The longest sequence among those.
    longest_single: int = 0


@dataclass(frozen=True, slots=True)
class TorchKV:
    """K and V of one group in spec.dtype, [layers, 2, blocks, KH, block_size, D] (0 is K, 1 is V); int8 with a scale for each
    vector, bfloat16 [layers, 2, blocks, KH, block_size]."""

    spec: KVSpec
    pool: Tensor
    scales: Tensor | None

    @staticmethod
    def block_bytes(spec: KVSpec) -> int:
        vector = spec.head_dim * KV_DTYPES[spec.dtype].itemsize + (2 if spec.dtype == "int8" else 0)
        return spec.num_layers * 2 * spec.num_kv_heads * spec.block_size * vector

    @classmethod
    def allocate(cls, spec: KVSpec, device: torch.device) -> TorchKV:
        shape = (spec.num_layers, 2, spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        scales = torch.zeros(shape[:-1], dtype=torch.bfloat16, device=device) if spec.dtype == "int8" else None
        return cls(spec, torch.zeros(shape, dtype=KV_DTYPES[spec.dtype], device=device), scales)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        block, offset = slots // self.spec.block_size, slots % self.spec.block_size
        for which, values in enumerate((k, v)):
            self._store((layer, which, block, slice(None), offset), values)

    def _store(self, where: tuple[Any, ...], values: Tensor) -> None:
        """values float32 [..., D] to pool[where]."""
        if self.scales is not None:
            values, self.scales[where] = quantize_int8(values)
        self.pool[where] = values.to(self.pool.dtype)

    def _load(self, where: tuple[Any, ...]) -> Tensor:
        values = self.pool[where].float()
        return values if self.scales is None else values * self.scales[where].float().unsqueeze(-1)

    def read(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """K and V float32 [S, KH, blocks * block_size, D] of tables [S, blocks]."""
        both = self._load((layer, slice(None), tables.long())).permute(0, 1, 3, 2, 4, 5)  # [2, S, KH, blocks, block_size, D]
        both = both.reshape(2, tables.shape[0], self.spec.num_kv_heads, -1, self.spec.head_dim)
        return both[0], both[1]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for memory in (self.pool,) if self.scales is None else (self.pool, self.scales):
            memory[:, :, list(targets)] = memory[:, :, list(sources)]

    def export_block(self, block: int) -> Tensor:
        return self._load((slice(None), slice(None), block))

    def import_block(self, block: int, values: Tensor) -> None:
        self._store((slice(None), slice(None), block), values)


def quantize_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """As ops/layout.py: quantize_int8; the scale bfloat16."""
    exact = values.abs().amax(dim=-1) / 127
    scale = torch.where(exact < torch.finfo(torch.float32).tiny, 0.0, exact.bfloat16().float())
    scale = scale.masked_fill(~torch.isfinite(scale * 127), torch.nan)
    q = (values / scale.unsqueeze(-1)).round().clamp(-127, 127)
    return torch.where(scale.unsqueeze(-1) > 0, q, 0.0).to(torch.int8), scale.bfloat16()


def batch_to_device(batch: ForwardBatch, device: torch.device) -> TorchBatch:
    """The arrays of a NumPy batch as tensors, and the host-side plan of its segments."""

    def move(array: object) -> Tensor:
        return torch.as_tensor(array).to(device)

    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    counts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    single = [s for s, count in enumerate(counts) if count == 1]
    values = {f.name: getattr(batch, f.name) for f in fields(ForwardBatch)}
    for name in ("token_ids", "positions", "query_start_loc", "seq_lens", "logits_rows"):
        values[name] = move(values[name])
    for name in ("block_tables", "slot_mapping"):
        values[name] = tuple(move(array) for array in values[name])
    return TorchBatch(
        **values,
        long_segments=tuple((starts[s], starts[s + 1], lengths[s] - n, s) for s, n in enumerate(counts) if n > 1),
        single_rows=torch.tensor([starts[s] for s in single], dtype=torch.long, device=device),
        single_segments=torch.tensor(single, dtype=torch.long, device=device),
        longest_single=max((lengths[s] for s in single), default=0),
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ops/reference/attention.py: rotate."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def attend(
    q: Tensor, kv: TorchKV, layer: int, batch: TorchBatch, group: int, scale: float, window: int | None, softcap: float, out: Tensor
) -> None:
    """Fills out [T, H, D] from q [T, H, D]."""
    tables, block_size = batch.block_tables[group], kv.spec.block_size
    if batch.longest_single:
        blocks = -(-batch.longest_single // block_size)
        rows = batch.single_rows
        # A shorter sequence's table holds anything past its end: any block will do there, its keys are hidden.
        some = tables[batch.single_segments, :blocks].clamp(0, kv.spec.num_blocks - 1)
        k, v = kv.read(layer, some)
        out[rows] = _attend(q[rows].unsqueeze(1), k, v, batch.positions[rows].unsqueeze(1), 0, scale, window, softcap).squeeze(1)
    for start, end, first_position, segment in batch.long_segments:
        run = max(1, _MAX_SCORES // (q.shape[1] * (first_position + end - start)))
        for row in range(start, end, run):
            stop = min(row + run, end)
            low = first_position + row - start
            first_block = 0 if window is None else max(0, low - window + 1) // block_size
            last_block = (low + stop - row - 1) // block_size
            k, v = kv.read(layer, tables[segment : segment + 1, first_block : last_block + 1])
            positions = batch.positions[row:stop].unsqueeze(0)
            out[row:stop] = _attend(q[row:stop].unsqueeze(0), k, v, positions, first_block * block_size, scale, window, softcap)[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, first_key: int, scale: float, window: int | None, softcap: float) -> Tensor:
    """[S, n, H, D] of q [S, n, H, D] over k, v [S, KH, m, D] at positions first_key..., rows at positions [S, n]; see
    ops/reference/attention.py: attend_rows."""
    sequences, rows, heads, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = q.reshape(sequences, rows, kv_heads, -1, dim).transpose(1, 2).reshape(sequences, kv_heads, -1, dim)
    scores = grouped @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key_positions = torch.arange(first_key, first_key + keys, device=q.device)
    hidden = key_positions > positions.unsqueeze(-1)  # [S, n, m]
    if window is not None:
        hidden |= key_positions <= positions.unsqueeze(-1) - window
    scores = scores.reshape(sequences, kv_heads, rows, -1, keys).masked_fill(hidden[:, None, :, None, :], -torch.inf)
    weights = torch.softmax(scores, dim=-1).reshape(sequences, kv_heads, -1, keys)
    v = v.masked_fill(hidden.all(dim=1)[:, None, :, None], 0.0)  # stale values need not be finite
    mixed = (weights @ v).reshape(sequences, kv_heads, rows, -1, dim)
    return mixed.transpose(1, 2).reshape(sequences, rows, heads, dim)
