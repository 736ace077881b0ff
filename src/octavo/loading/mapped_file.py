"""A read-only memory map of a model file, shared by the GGUF and the safetensors reader.

Owns the map. Views handed out keep it alive by themselves. Not here: any file format.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from octavo.errors import ModelLoadError


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """A file open for reading, whatever link leads to it. ModelLoadError for whatever cannot be read, and for pipes and
    devices: those may block or never end, so they are opened without waiting and looked at first."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as handle:
            if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
                raise ModelLoadError(f"{path}: not a regular file")
            yield handle
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise ModelLoadError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_start(path: Path, most: int) -> bytes:
    """The first bytes of a file, at most `most`. Raises ModelLoadError."""
    with open_regular(path) as handle:
        return handle.read(most)


class MappedFile:
    """Raises ModelLoadError when the file cannot be opened or has fewer than `least` bytes (a map cannot be empty)."""

    def __init__(self, path: str | Path, least: int) -> None:
        self.path = Path(path)
        with open_regular(self.path) as handle:
            self.size = handle.seek(0, 2)
            if self.size < least:
                raise ModelLoadError(f"{self.path}: only {self.size} bytes long, so not a model file (a broken download?)")
            self._map: mmap.mmap | None = mmap.mmap(handle.fileno(), self.size, access=mmap.ACCESS_READ)

    @property
    def buffer(self) -> mmap.mmap:
        if self._map is None:
            raise ModelLoadError(f"{self.path}: the file has been closed")
        return self._map

    @property
    def closed(self) -> bool:
        return self._map is None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes [offset, offset + nbytes), not copied; the caller has checked that they exist.

        A file that was cut since would end the process when the lost bytes are touched: refused while there is time.
        """
        if self.buffer.size() != self.size:
            raise ModelLoadError(f"{self.path}: has changed while it was read (a download still running?)")
        return memoryview(self.buffer)[offset : offset + nbytes]

    def release(self, offset: int, nbytes: int) -> None:
        """Lets go of the memory of these bytes, which have been read: the file's pages stay in the system's cache, and
        come back where a view is read again."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            with suppress(OSError):  # a wish
                self._map.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)

    def close(self) -> None:
        """Unmaps the file, or, where views of it are still alive, leaves that to the last of them."""
        mapped, self._map = self._map, None
        if mapped is not None:
            with suppress(BufferError):  # an array still looks into the map; the map goes when that array does
                mapped.close()
