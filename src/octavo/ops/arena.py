"""The step arena: where every array an op returns lives, so that no op allocates its result.

Owner: one Ops object owns one Arena; layers only open scopes in it. A take reserves room for `capacity_rows` rows
however many are asked for, so the address of an output depends on the takes before it (their columns and dtypes) and
never on a row count: a step can be recorded once and replayed for any number of rows.
Not here: anything that must outlive a step (weights, the KV pool), and any arithmetic.

    chunk 0 [ take 0 | take 1 | ... ] chunk 1 [ take 7 | ...]     positions are bytes from the start of chunk 0;
              ^ scope opened here: leaving it makes this the next free position again
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

ALIGNMENT = 64  # one cache line, one 512-bit vector
_CHUNK_BYTES = 32 << 20
#: Views kept for reuse; beyond that many different (position, rows) pairs the cache starts over.
_MAX_VIEWS = 8192

Shape = tuple[int, ...]


def numpy_buffer(num_bytes: int) -> np.ndarray[Any, Any]:
    """Uninitialised bytes, aligned; the operating system gives pages when they are first touched."""
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def numpy_view(buffer: np.ndarray[Any, Any], offset: int, shape: Shape, dtype: Any) -> np.ndarray[Any, Any]:
    return np.ndarray(shape, dtype, buffer=buffer, offset=offset)


class _Scope:
    """Gives everything taken inside back on exit, also on an exception."""

    __slots__ = ("_arena", "_mark")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._mark = 0

    def __enter__(self) -> None:
        self._mark = self._arena._position

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._arena._position = self._mark


class Arena:
    """A stack of arrays [rows, ...] in a few large chunks.

    `allocate(num_bytes)` makes a chunk whose start is 64-byte aligned; `view(buffer, offset, shape, dtype)` makes an
    array of the backend inside it. Chunks are added when needed and never freed or moved. Not thread-safe: one step
    runs at a time.
    """

    def __init__(
        self,
        capacity_rows: int,
        allocate: Callable[[int], Any] = numpy_buffer,
        view: Callable[[Any, int, Shape, Any], Any] = numpy_view,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        if capacity_rows < 1:
            raise ValueError(f"capacity_rows must be at least 1, got {capacity_rows}")
        self.capacity_rows = capacity_rows
        #: Goes up whenever addresses of an earlier recording no longer hold.
        self.epoch = 0
        self._allocate, self._view, self._chunk_bytes = allocate, view, chunk_bytes
        self._chunks: list[tuple[int, int, Any]] = []  # (first position, bytes, buffer), ascending
        self._position = 0
        # (position, rows, columns, dtype) -> (array, next position): a steady state is one dictionary look-up per take
        self._views: dict[tuple[int, int, int | Shape, Any], tuple[Any, int]] = {}

    def take(self, rows: int, cols: int | Shape, dtype: Any = np.float32) -> Any:
        """An uninitialised array [rows, cols], or [rows, *cols] for a tuple; valid until its scope closes."""
        key = (self._position, rows, cols, dtype)
        found = self._views.get(key)
        if found is None:
            found = self._place(rows, cols, dtype)
        self._position = found[1]
        return found[0]

    def take_at(self, position: int, rows: int, cols: int | Shape, dtype: Any = np.float32) -> Any:
        """What a take at `position` gives; the next one comes after it."""
        self._position = position
        return self.take(rows, cols, dtype)

    def position_of(self, array: Any) -> int | None:
        """Where the take began that gave this very array (not a part of it); None if none did."""
        return next((key[0] for key, (taken, _) in self._views.items() if taken is array), None)

    def scope(self) -> _Scope:
        """`with arena.scope():` gives back on exit whatever was taken inside."""
        return _Scope(self)

    def reset(self) -> None:
        """Gives everything back: the start of a step."""
        self._position = 0

    def reserve_rows(self, rows: int) -> None:
        """Makes takes of up to `rows` rows possible. Growing changes later addresses (see `epoch`); arrays already
        taken stay valid."""
        if rows > self.capacity_rows:
            self.capacity_rows = 1 << (rows - 1).bit_length()  # doubling: few growths, whatever the row counts
            self.epoch += 1
            self._views.clear()

    @property
    def buffers(self) -> list[Any]:
        """All chunks, in the order they were added."""
        return [buffer for _, _, buffer in self._chunks]

    @property
    def reserved_bytes(self) -> int:
        """Address space held by all chunks; what was never touched costs no memory on a CPU."""
        return sum(size for _, size, _ in self._chunks)

    def _place(self, rows: int, cols: int | Shape, dtype: Any) -> tuple[Any, int]:
        self.reserve_rows(rows)
        tail = cols if isinstance(cols, tuple) else (cols,)
        need = self.capacity_rows * _item_bytes(dtype)
        for size in tail:
            need *= size
        need = max(ALIGNMENT, -(-need // ALIGNMENT) * ALIGNMENT)
        start, buffer, offset = self._find(need)
        placed = (self._view(buffer, offset, (rows, *tail), dtype), start + need)
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        self._views[(self._position, rows, cols, dtype)] = placed
        return placed

    def _find(self, need: int) -> tuple[int, Any, int]:
        """(position, buffer, offset in it) of the first room of `need` bytes at or after the current position. Chunks
        are only ever appended, so the same takes find the same room each time."""
        for first, size, buffer in self._chunks:
            offset = max(self._position - first, 0)
            if offset + need <= size:
                return first + offset, buffer, offset
        first = self.reserved_bytes
        size = max(need, self._chunk_bytes)
        buffer = self._allocate(size)
        self._chunks.append((first, size, buffer))
        return first, buffer, 0


def _item_bytes(dtype: Any) -> int:
    size = getattr(dtype, "itemsize", None)  # numpy.dtype and torch.dtype have it as a number, numpy's scalar types do not
    return size if isinstance(size, int) else np.dtype(dtype).itemsize
