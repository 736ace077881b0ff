"""A reader of GGUF files, versions 2 and 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), over a memory map.

Opening reads the header only: metadata and the table of tensors, each count, length and offset checked against the
bytes that are left before anything is allocated, because a model file is a stranger's input. GGUFFile owns the map.
Not here: what the metadata mean (gguf_config.py), the block formats (quantization/), names of weights (weights.py).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from octavo.errors import ModelLoadError, shown
from octavo.loading.mapped_file import MappedFile

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
#: Elements of one metadata array; the largest vocabularies and merge lists have about half a million.
MAX_ARRAY = 1 << 21
#: Elements of all arrays, and bytes of everything before the tensor data: about ten times what the largest vocabularies need. A
#: number of two bytes in the file takes forty in memory.
MAX_ELEMENTS = 1 << 22
MAX_HEADER_BYTES = 1 << 28
MAX_NAME_BYTES = 1 << 10
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32


class BlockType(NamedTuple):
    """A ggml tensor type: `block` values take `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


#: Every type id in use, so that a tensor of a type nobody can decode here is still reported by name.
BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 2: BlockType("Q4_0", 32, 18), 3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22), 7: BlockType("Q5_1", 32, 24), 8: BlockType("Q8_0", 32, 34), 9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84), 11: BlockType("Q3_K", 256, 110), 12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176), 14: BlockType("Q6_K", 256, 210), 15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66), 17: BlockType("IQ2_XS", 256, 74), 18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50), 20: BlockType("IQ4_NL", 32, 18), 21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82), 23: BlockType("IQ4_XS", 256, 136), 24: BlockType("I8", 1, 1), 25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4), 27: BlockType("I64", 1, 8), 28: BlockType("F64", 1, 8), 29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2), 34: BlockType("TQ1_0", 256, 54), 35: BlockType("TQ2_0", 256, 66), 39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36), 41: BlockType("Q1_0", 128, 18),
}  # fmt: skip

_U32, _U64 = Struct("<I"), Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
#: Metadata value type -> little-endian NumPy dtype of the plain ones.
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor table. `shape` is row-major, [N, K] for a matrix (the file stores it the other way round)."""

    name: str
    type: int
    shape: tuple[int, ...]
    #: From the start of the file.
    offset: int
    nbytes: int
    file: GGUFFile

    @property
    def type_name(self) -> str:
        return BLOCK_TYPES[self.type].name

    def raw(self) -> memoryview:
        """The tensor's bytes, read-only, without a copy; keeps the file mapped while it lives."""
        return self.file.view(self.offset, self.nbytes)


class _Strings(NamedTuple):
    strings: list[str]
    end: int


def _split_strings(buffer: mmap.mmap, start: int, count: int) -> _Strings | None:
    """`count` length-prefixed strings at `start` without a Python loop, or None where the plain loop must decide.

    A length below 2^16 ends in six zero bytes, and text has none: so the last six-byte window of each run of zeros
    marks a prefix. That guess is then proved: every prefix must begin exactly where the string before it ends, and all
    zero bytes must lie in prefixes. Keeping one of them as a separator, the rest is one decode and one split. Empty,
    very long or binary strings break the proof and are left to the loop.
    """
    for guess in (32, 256) if count <= 1 << 19 else (32,):  # bytes per string; on average 10 to 20
        data = np.frombuffer(buffer[start : start + count * guess], np.uint8)
        zero = data == 0
        pair = zero[:-1] & zero[1:]
        run = pair[:-4] & pair[2:-2] & pair[4:]
        prefix = np.flatnonzero(run[:-1] & ~run[1:])[:count] - 2
        if prefix.size == count and prefix[0] == 0:
            break
    else:
        return None
    low, high = data[prefix], data[prefix + 1]
    ends = prefix + 8 + low + high.astype(np.int64) * 256
    end = int(ends[-1])
    zeros = 6 * count + int((low == 0).sum()) + int((high == 0).sum())
    if end > data.size or not np.array_equal(ends[:-1], prefix[1:]) or int(zero[:end].sum()) != zeros:
        return None
    keep = np.ones(end, np.bool_)
    keep[(prefix[:, None] + np.arange(7)).ravel()] = False
    try:
        text = str(data[:end][keep].tobytes(), "utf-8")
    except UnicodeDecodeError:
        return None  # the loop names the string
    return _Strings(text.split("\0")[1:], start + end)


class _Cursor:
    """Reads forward through the header and never past the end of the file."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.end = len(buffer)
        self.pos = 0
        self.elements_left = MAX_ELEMENTS

    def fail(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: not a usable GGUF file: {what}")

    def take(self, nbytes: int, what: str) -> int:
        """Moves past `nbytes`, which must be there, and returns where they start."""
        start = self.pos
        if nbytes > self.end - start:
            raise self.fail(f"{what} needs {nbytes} bytes at offset {start}, the file ends at {self.end}")
        if nbytes > MAX_HEADER_BYTES - start:
            raise self.fail(f"{what} ends beyond the limit of {MAX_HEADER_BYTES} bytes for everything before the tensors")
        self.pos = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.take(8, what))[0])

    def count(self, what: str, most: int, each: int) -> int:
        """A u64 count of things of at least `each` bytes, so that the file could hold them."""
        count = self.u64(what)
        if count > most or count * each > self.end - self.pos:
            raise self.fail(f"{what} is {count}, more than {'this file can hold' if count <= most else f'the limit of {most}'}")
        return count

    def string(self, what: str, most: int | None = None) -> str:
        size = self.u64(f"the length of {what}")
        if most is not None and size > most:
            raise self.fail(f"{what} is {size} bytes long, the limit is {most}")
        start = self.take(size, what)
        try:
            return str(self.buffer[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 (byte {start + error.start})") from None

    def name(self, what: str) -> str:
        """A string that messages and logs may show as it is."""
        name = self.string(what, MAX_NAME_BYTES)
        if not name or not name.isprintable():
            raise self.fail(f"{what} is {'not printable: ' + shown(name) if name else 'empty'}")
        return name

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings in a row. A vocabulary has 10^5 of them, so the usual case is done by whole-array steps."""
        out = _split_strings(self.buffer, self.pos, count) if count >= 64 else None
        if out is not None:
            self.pos = out.end
            return out.strings
        return [self.string(f"{what}[{i}]") for i in range(count)]

    def values(self, kind: int, count: int, what: str) -> list[Any]:
        """`count` plain numbers or booleans of value type `kind`."""
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(count * dtype.itemsize, what)
        found = np.frombuffer(self.buffer[start : self.pos], dtype)
        if kind == _BOOL:
            if found.size and int(found.max()) > 1:
                raise self.fail(f"{what} holds a boolean that is neither 0 nor 1")
            found = found.astype(np.bool_)
        return list(found.tolist())

    def value(self, key: str) -> tuple[int, Any]:
        """The value type and the Python value of a metadata entry."""
        what = f"metadata {shown(key)}"
        kind = self.u32(what)
        if kind in _SCALARS:
            return kind, self.values(kind, 1, what)[0]
        if kind == _STRING:
            return kind, self.string(what)
        if kind != _ARRAY:
            raise self.fail(f"{what} has the unknown value type {kind}")
        element = self.u32(what)
        if element == _ARRAY:
            raise self.fail(f"{what} is an array of arrays, which no known model uses")
        if element != _STRING and element not in _SCALARS:
            raise self.fail(f"{what} is an array of the unknown value type {element}")
        each = 8 if element == _STRING else np.dtype(_SCALARS[element]).itemsize
        count = self.count(f"the length of {what}", min(MAX_ARRAY, self.elements_left), each)
        self.elements_left -= count
        return kind, self.strings(count, what) if element == _STRING else self.values(element, count, what)


class GGUFFile:
    """An open GGUF file. `metadata`: key -> int, float, bool, str or a list of those; `tensors`: name -> GGUFTensor.

    Raises ModelLoadError, naming the file, for anything the format does not allow.
    """

    def __init__(self, path: str | Path) -> None:
        # magic, version and two counts take 24 bytes
        self._mapped = MappedFile(path, least=24)
        self.path = self._mapped.path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse(_Cursor(self._mapped.buffer, self.path))
        except BaseException:
            self.close()
            raise

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Read-only bytes [offset, offset + nbytes) of the file, not copied."""
        return self._mapped.view(offset, nbytes)

    def release(self, tensor: GGUFTensor) -> None:
        """Its bytes have been read: the memory may go (MappedFile.release)."""
        self._mapped.release(tensor.offset, tensor.nbytes)

    @property
    def closed(self) -> bool:
        return self._mapped.closed

    def close(self) -> None:
        """Unmaps the file, or, where views of it are still alive, leaves that to the last of them."""
        self._mapped.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the header ----------------------------------------------------------------------------------------------
    def _parse(self, cursor: _Cursor) -> None:
        num_tensors, num_keys = self._preamble(cursor)
        alignment = DEFAULT_ALIGNMENT
        for _ in range(num_keys):
            key = cursor.name("a metadata key")
            if key in self.metadata:
                raise cursor.fail(f"the metadata key {shown(key)} is there twice")
            kind, value = cursor.value(key)
            if key == "general.alignment":
                alignment = self._alignment(cursor, kind, value)
            self.metadata[key] = value
        found = [self._tensor_info(cursor) for _ in range(num_tensors)]
        self._place(cursor, found, alignment)

    def _preamble(self, cursor: _Cursor) -> tuple[int, int]:
        """Checks magic and version; returns the numbers of tensors and of metadata entries."""
        magic = cursor.buffer[:4]
        if magic != b"GGUF":
            raise cursor.fail(f"it starts with {magic!r}, not b'GGUF'")
        cursor.pos = 4
        version = cursor.u32("the version")
        if version not in (2, 3):
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
                raise cursor.fail("it is big-endian, and only little-endian files are supported")
            raise cursor.fail(f"its version is {version}, and only 2 and 3 are supported: convert the model again")
        # The smallest tensor entry: empty name, one dimension, type, offset; the smallest metadata entry: "", u8.
        num_tensors = cursor.count("the number of tensors", MAX_TENSORS, 8 + 4 + 8 + 4 + 8)
        num_keys = cursor.count("the number of metadata entries", MAX_KEYS, 8 + 4 + 1)
        return num_tensors, num_keys

    @staticmethod
    def _alignment(cursor: _Cursor, kind: int, value: Any) -> int:
        if kind != 4:
            raise cursor.fail("general.alignment is not a 32-bit unsigned integer")
        if not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise cursor.fail(f"general.alignment is {value}, not a power of two between 8 and {MAX_ALIGNMENT}")
        return int(value)

    def _tensor_info(self, cursor: _Cursor) -> GGUFTensor:
        """One entry of the table, with the offset still relative to the data section."""
        name = cursor.name("a tensor name")
        what = f"tensor {shown(name)}"
        num_dims = cursor.u32(what)
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.fail(f"{what} has {num_dims} dimensions, and 1 to {MAX_DIMS} are allowed")
        dims = [cursor.u64(what) for _ in range(num_dims)]
        kind = cursor.u32(what)
        offset = cursor.u64(what)
        block = BLOCK_TYPES.get(kind)
        if block is None:
            raise cursor.fail(f"{what} has the unknown type {kind}")
        if 0 in dims:
            raise cursor.fail(f"{what} has a dimension of 0")
        if dims[0] % block.block:
            raise cursor.fail(f"{what} has rows of {dims[0]} values, not a multiple of the {block.block} of {block.name}")
        size = block.nbytes  # Python integers do not overflow, so a product of four u64 is just a large number
        for dim in dims:
            size *= dim
        size //= block.block
        if size > cursor.end:
            raise cursor.fail(f"{what} of shape {dims[::-1]} needs {size} bytes, the file has {cursor.end}")
        return GGUFTensor(name, kind, tuple(dims[::-1]), offset, size, self)

    def _place(self, cursor: _Cursor, found: list[GGUFTensor], alignment: int) -> None:
        """Fills `tensors` with absolute offsets; refuses what is misaligned, out of the file or on top of another."""
        data = -(-cursor.pos // alignment) * alignment
        for tensor in found:
            if tensor.name in self.tensors:
                raise cursor.fail(f"tensor {shown(tensor.name)} is there twice")
            if tensor.offset % alignment:
                raise cursor.fail(f"tensor {shown(tensor.name)} starts at {tensor.offset}, not a multiple of the alignment {alignment}")
            start = data + tensor.offset
            if start + tensor.nbytes > cursor.end:
                raise cursor.fail(
                    f"tensor {shown(tensor.name)} ends at byte {start + tensor.nbytes}, the file at {cursor.end} (a broken download?)"
                )
            self.tensors[tensor.name] = GGUFTensor(tensor.name, tensor.type, tensor.shape, start, tensor.nbytes, self)
        for before, after in pairwise(sorted(self.tensors.values(), key=lambda t: t.offset)):
            if before.offset + before.nbytes > after.offset:
                raise cursor.fail(f"tensors {shown(before.name)} and {shown(after.name)} overlap")
