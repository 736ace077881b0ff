"""Float64 oracles of the ops and random inputs for them, written from ops/api.py alone: no code of any backend is used.

Everything here is slow and obvious on purpose: one row, one head, one key at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from octavo.ops.api import ForwardBatch, KVSpec, PackedTensor

#: Past the end of a table: reading it as a block number would fault.
UNUSED = 2**31 - 1


def bf16_round(values: np.ndarray) -> np.ndarray:
    """Nearest bfloat16 (8 significant bits), ties to even, of normal numbers: by arithmetic, not by bits."""
    values = np.asarray(values, np.float64)
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2**8) / 2**8, exponent)  # numpy rounds ties to even


def round_kv(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return bf16_round(values)
    if dtype == "int8":  # vectors along the last axis
        scale = bf16_round(np.abs(values.astype(np.float64)).max(axis=-1, keepdims=True) / 127)
        return np.round(values / np.where(scale == 0, 1, scale)).clip(-127, 127) * scale
    return values.astype({"f16": np.float16, "f32": np.float32}[dtype]).astype(np.float64)


def random_packed(
    rng: np.random.Generator, layout: str, rows: int, cols: int, *, offset: bool = False, zero: int = 0, scale_dtype=np.float16
) -> tuple[PackedTensor, np.ndarray]:
    """A random PackedTensor [rows, cols] and the values it stands for, float64, from the formula in ops/api.py."""
    shape = (rows, cols)
    if layout in ("f32", "f16", "bf16"):
        values = rng.standard_normal(shape).astype(np.float32)
        if layout == "f32":
            return PackedTensor("f32", shape, values), values.astype(np.float64)
        if layout == "f16":
            half = values.astype(np.float16)
            return PackedTensor("f16", shape, half.view(np.uint16)), half.astype(np.float64)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return PackedTensor("bf16", shape, bits), np.array((bits.astype(np.uint32) << 16).view(np.float32), np.float64)
    block = {"q8_b16": 16, "q4_g128": 128, "q8_g128": 128}.get(layout, 32)
    low, high = (0, 16) if layout.startswith("q4") else (-128, 128)
    q = rng.integers(low, high, shape)
    scale = (rng.standard_normal((rows, cols // block)) * 0.1).astype(scale_dtype)
    shift = rng.standard_normal((rows, cols // block)).astype(scale_dtype) if offset else None
    values = np.repeat(scale.astype(np.float64), block, axis=1) * (q - zero)
    if shift is not None:
        values += np.repeat(shift.astype(np.float64), block, axis=1)
    return PackedTensor(layout, shape, pack_q(layout, q), scale, shift, zero), values


def pack_q(layout: str, q: np.ndarray) -> np.ndarray:
    if not layout.startswith("q4"):
        return q.astype(np.int8)
    rows, cols = q.shape
    data = np.zeros((rows, cols // 2), np.uint8)
    for n in range(rows):
        for b in range(cols // 32):
            for j in range(16):
                data[n, b * 16 + j] = q[n, b * 32 + j] | (q[n, b * 32 + 16 + j] << 4)
    return data


@dataclass(frozen=True)
class Segment:
    """`rows` new tokens of a sequence that is `length` long after the step."""

    rows: int
    length: int


def make_batch(rng: np.random.Generator, segments: list[Segment], spec: KVSpec, kv: object, num_generated: int = 0) -> ForwardBatch:
    """A batch whose segments own shuffled blocks of the pool."""
    free = iter(rng.permutation(spec.num_blocks).tolist())
    size = spec.block_size
    width = max((-(-s.length // size) for s in segments), default=0) + 2
    tables = np.full((len(segments), width), UNUSED, np.int32)
    positions: list[int] = []
    slots: list[int] = []
    for index, segment in enumerate(segments):
        count = -(-segment.length // size)
        tables[index, :count] = [next(free) for _ in range(count)]
        for position in range(segment.length - segment.rows, segment.length):
            positions.append(position)
            slots.append(int(tables[index, position // size]) * size + position % size)
    total = len(positions)
    return ForwardBatch(
        token_ids=np.zeros(total, np.int32),
        positions=np.array(positions, np.int32),
        query_start_loc=np.cumsum([0, *(s.rows for s in segments)]).astype(np.int32),
        seq_lens=np.array([s.length for s in segments], np.int32),
        block_tables=(tables,),
        slot_mapping=(np.array(slots, np.int64),),
        num_generated=num_generated,
        logits_rows=np.arange(total, dtype=np.int32),
        num_generated_logits=num_generated,
        kv=(kv,),
    )


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight.astype(np.float64)


def silu_mul(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def rotate(x: np.ndarray, position: int, theta: float, dim: int) -> np.ndarray:
    """One head [D] at one position, plain frequencies."""
    out = x.astype(np.float64).copy()
    for i in range(dim // 2):
        angle = position * theta ** (-2 * i / dim)
        a, b = float(x[i]), float(x[i + dim // 2])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attend(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, scale: float, window: int | None, softcap: float
) -> np.ndarray:
    """One row q [H, D] at `position` over keys, values [KH, tokens, D]: float64 [H, D]."""
    q = q.astype(np.float64)
    heads, kv_heads = q.shape[0], keys.shape[0]
    first = 0 if window is None else max(0, position - window + 1)
    out = np.zeros(q.shape)
    for h in range(heads):
        kv_head = h // (heads // kv_heads)
        scores = np.array([float(q[h] @ keys[kv_head, t]) * scale for t in range(first, position + 1)])
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[h] = (weights / weights.sum()) @ values[kv_head, first : position + 1]
    return out
