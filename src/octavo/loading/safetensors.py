"""A reader of safetensors checkpoints, one file or sharded, over memory maps.

Format: u64 header length, JSON header, data (https://huggingface.co/docs/safetensors). Read here rather than by the
safetensors package because its NumPy path has no bfloat16 and it has no views of single tensors without torch.
SafetensorsFile owns its map, Checkpoint its files. Not here: pickled formats (refused), names of weights (weights.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from octavo.errors import ModelLoadError, shown
from octavo.loading.json_file import parse_json_object, read_json_object
from octavo.loading.mapped_file import MappedFile

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 1 << 25
MAX_DIMS = 8
MAX_NAME_CHARS = 1 << 10

#: Bytes per value of every dtype the format knows; only some can be loaded (tensor_source.py).
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "U64": 8, "I32": 4, "U32": 4,
    "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "C64": 8, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    #: From the start of the file.
    offset: int
    nbytes: int
    file: SafetensorsFile

    def raw(self) -> memoryview:
        """The tensor's bytes, read-only, without a copy; keeps the file mapped while it lives."""
        return self.file.mapped.view(self.offset, self.nbytes)


class SafetensorsFile:
    """One file. `tensors`: name -> SafetensorsTensor. Raises ModelLoadError naming the file."""

    def __init__(self, path: str | Path) -> None:
        self.mapped = MappedFile(path, least=10)  # a length and "{}"
        self.path = self.mapped.path
        self.tensors: dict[str, SafetensorsTensor] = {}
        try:
            self._parse()
        except BaseException:
            self.mapped.close()
            raise

    def _fail(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: not a usable safetensors file: {what}")

    def _parse(self) -> None:
        length = int.from_bytes(self.mapped.buffer[:8], "little")
        if length > MAX_HEADER_BYTES or 8 + length > self.mapped.size:
            raise self._fail(f"its header is {length} bytes long, the file {self.mapped.size} (a broken download?)")
        header = parse_json_object(self.mapped.buffer[8 : 8 + length], str(self.path))
        header.pop("__metadata__", None)
        start = 8 + length
        for name, entry in header.items():
            self.tensors[name] = self._tensor(name, entry, start)
        # The data are all of the file and lie end to end, so nothing overlaps, hides or is cut off.
        end = start
        for tensor in sorted(self.tensors.values(), key=lambda t: (t.offset, t.nbytes)):
            if tensor.offset != end:
                what = "overlaps the one before it" if tensor.offset < end else "leaves a gap before it"
                raise self._fail(f"tensor {shown(tensor.name)} {what}")
            end += tensor.nbytes
        if end != self.mapped.size:
            raise self._fail(f"{self.mapped.size - end} bytes follow the last tensor")

    def _tensor(self, name: str, entry: Any, start: int) -> SafetensorsTensor:
        if not name.isprintable() or len(name) > MAX_NAME_CHARS:  # messages and logs may show it as it is
            raise self._fail(f"a tensor has the name {shown(name)}")
        if not isinstance(entry, dict):
            raise self._fail(f"the entry of tensor {shown(name)} is not an object")
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
            raise self._fail(f"tensor {shown(name)} has the unknown dtype {shown(dtype)}")
        if not _is_sizes(shape) or len(shape) > MAX_DIMS:
            raise self._fail(f"tensor {shown(name)} has the shape {shown(shape)}")
        if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._fail(f"tensor {shown(name)} has the data_offsets {shown(offsets)}")
        nbytes = _ITEM_BYTES[dtype]
        for size in shape:
            nbytes *= size
        if nbytes != offsets[1] - offsets[0]:
            raise self._fail(f"tensor {shown(name)} of shape {shape} and dtype {dtype} does not have {offsets[1] - offsets[0]} bytes")
        if start + offsets[1] > self.mapped.size:
            raise self._fail(f"tensor {shown(name)} ends at byte {start + offsets[1]}, the file at {self.mapped.size} (a broken download?)")
        return SafetensorsTensor(name, dtype, tuple(shape), start + offsets[0], nbytes, self)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


class Checkpoint:
    """All files of a model as one. `tensors`: name -> SafetensorsTensor, over all files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files: list[SafetensorsFile] = []
        self.tensors: dict[str, SafetensorsTensor] = {}
        try:
            for path in paths:
                self.files.append(SafetensorsFile(path))
                for name, tensor in self.files[-1].tensors.items():
                    if name in self.tensors:
                        raise ModelLoadError(f"{path}: tensor {shown(name)} is also in {self.tensors[name].file.path.name}")
                    self.tensors[name] = tensor
            index = paths[0].parent / INDEX_NAME
            if index.is_file():
                self._check_index(index)
        except BaseException:
            self.close()
            raise

    def _check_index(self, index: Path) -> None:
        """Every tensor of the index lies in the file the index says."""
        for name, shard in _weight_map(index).items():
            if name not in self.tensors:
                raise ModelLoadError(
                    f"{index.parent / shard}: has no tensor {shown(name)}, which {index.name} says it holds (a broken download?)"
                )
            if self.tensors[name].file.path.name != shard:
                raise ModelLoadError(f"{index}: tensor {shown(name)} is not in {shard} but in {self.tensors[name].file.path.name}")

    def close(self) -> None:
        for file in self.files:
            file.mapped.close()


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, from a shard index; the names are plain, so that no index can point elsewhere."""
    found = read_json_object(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelLoadError(f"{index}: has no weight_map")
    for name, shard in found.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard or "\\" in shard or "\0" in shard:
            raise ModelLoadError(f"{index}: the file of tensor {shown(name)} is {shown(shard)}, not a plain .safetensors name")
    return found


def checkpoint_paths(folder: Path) -> tuple[Path, ...]:
    """The files of the checkpoint in a folder; () when it holds none.

    An index decides: the files it names are the model, and any other .safetensors beside it is ignored. Without an
    index it is model.safetensors, else the only .safetensors there. Raises ModelLoadError for a missing file.
    """
    index = folder / INDEX_NAME
    if os.path.lexists(index):
        paths = tuple(folder / name for name in sorted(set(_weight_map(index).values())))
        for path in paths:
            if not path.is_file():
                raise ModelLoadError(f"{path}: missing, though {INDEX_NAME} names it (a broken download?): fetch the model again")
        return paths
    if (folder / SINGLE_NAME).is_file():
        return (folder / SINGLE_NAME,)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1:
        raise ModelLoadError(f"{folder}: holds {len(found)} .safetensors files but no {INDEX_NAME}, which says what is in them")
    return tuple(found)
