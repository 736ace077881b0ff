"""Builds GGUF files byte by byte, right or wrong on purpose, without the gguf package (which refuses to write wrong ones)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY = 0, 4, 6, 7, 8, 9
F32, Q4_0, Q8_0, Q4_K = 0, 2, 8, 12


def string(text: str | bytes, length: int | None = None) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data) if length is None else length) + data


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def text(key: str, value: str | bytes) -> bytes:
    return entry(key, STRING, string(value))


def uint(key: str, value: int) -> bytes:
    return entry(key, UINT32, struct.pack("<I", value))


def real(key: str, value: float) -> bytes:
    return entry(key, FLOAT32, struct.pack("<f", value))


def array(key: str, kind: int, items: Sequence[bytes], length: int | None = None) -> bytes:
    return entry(key, ARRAY, struct.pack("<IQ", kind, len(items) if length is None else length) + b"".join(items))


def tensor(name: str | bytes, dims: Sequence[int], kind: int = F32, offset: int = 0, num_dims: int | None = None) -> bytes:
    """An entry of the table; `dims` in the file's order, K first."""
    count = len(dims) if num_dims is None else num_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def gguf(
    entries: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: bytes = b"", *, magic: bytes = b"GGUF", version: int = 3,
    num_tensors: int | None = None, num_entries: int | None = None, alignment: int = 32, order: str = "<",
) -> bytes:  # fmt: skip
    counts = (len(tensors) if num_tensors is None else num_tensors, len(entries) if num_entries is None else num_entries)
    head = magic + struct.pack(f"{order}IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment if alignment else 0) + data


def tiny_llama(**changes: Any) -> bytes:
    """A complete one-layer llama of hidden size 32 with a few tensors of several types, for mutation."""
    hidden, inner, vocab = 32, 64, 40
    shapes = {
        "token_embd.weight": ((hidden, vocab), Q8_0), "blk.0.attn_norm.weight": ((hidden,), F32),
        "blk.0.attn_q.weight": ((hidden, hidden), Q4_0), "blk.0.ffn_down.weight": ((inner, hidden), F32),
        "blk.0.wide.weight": ((256, 2), Q4_K), "rope_freqs.weight": ((8,), F32),
    }  # fmt: skip
    sizes = {F32: (1, 4), Q4_0: (32, 18), Q8_0: (32, 34), Q4_K: (256, 144)}
    table, data = [], b""
    for name, (dims, kind) in shapes.items():
        table.append(tensor(name, dims, kind, len(data)))
        count = dims[0] * (dims[1] if len(dims) > 1 else 1)
        nbytes = count // sizes[kind][0] * sizes[kind][1]
        data += (b"\x01\x3c\x5a\x3f" * (nbytes // 4 + 1))[:nbytes]
        data += b"\0" * (-len(data) % 32)
    entries = [
        text("general.architecture", "llama"), uint("general.alignment", 32), uint("llama.block_count", 1),
        uint("llama.context_length", 128), uint("llama.embedding_length", hidden), uint("llama.feed_forward_length", inner),
        uint("llama.attention.head_count", 2), uint("llama.attention.head_count_kv", 1), uint("llama.rope.dimension_count", 16),
        real("llama.attention.layer_norm_rms_epsilon", 1e-5), entry("flag", BOOL, b"\x01"),
        array("tokenizer.ggml.tokens", STRING, [string(f"t{i}") for i in range(vocab * 2)]),
        array("tokenizer.ggml.token_type", UINT32, [struct.pack("<I", 1)] * vocab * 2), text("tokenizer.chat_template", "{{ x }}"),
    ]  # fmt: skip
    return gguf(entries, table, data, **changes)
