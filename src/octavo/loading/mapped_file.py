"""A read-only memory map of a model file, shared by the GGUF and the safetensors reader.

Owns the map. Views handed out keep it alive by themselves. Not here: any file format.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path

from octavo.errors import ModelLoadError


class MappedFile:
    """Raises ModelLoadError when the file cannot be opened or has fewer than `least` bytes (a map cannot be empty)."""

    def __init__(self, path: str | Path, least: int) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as handle:
                self.size = handle.seek(0, 2)
                if self.size < least:
                    raise ModelLoadError(f"{self.path}: only {self.size} bytes long, so not a model file (a broken download?)")
                self._map: mmap.mmap | None = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    @property
    def buffer(self) -> mmap.mmap:
        if self._map is None:
            raise ModelLoadError(f"{self.path}: the file has been closed")
        return self._map

    @property
    def closed(self) -> bool:
        return self._map is None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes [offset, offset + nbytes), not copied; the caller has checked that they exist."""
        return memoryview(self.buffer)[offset : offset + nbytes]

    def close(self) -> None:
        """Unmaps the file, or, where views of it are still alive, leaves that to the last of them."""
        mapped, self._map = self._map, None
        if mapped is not None:
            with suppress(BufferError):  # an array still looks into the map; the map goes when that array does
                mapped.close()
