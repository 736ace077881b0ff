"""One face for the two file formats: named tensors that come out as packed matrices or float32 vectors.

A source owns its open files until `close`. Not here: which tensors a model wants (weights.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelLoadError, shown
from octavo.loading.gguf import GGUFFile
from octavo.loading.safetensors import Checkpoint
from octavo.ops.api import PackedTensor
from octavo.quantization import float_types
from octavo.quantization.packed import dequantize
from octavo.quantization.registry import Transcoder, transcode

_SAFETENSORS_TYPES: Mapping[str, Transcoder] = MappingProxyType({"F32": float_types.f32, "F16": float_types.f16, "BF16": float_types.bf16})


class TensorSource(Protocol):
    #: For messages.
    where: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> row-major shape of every tensor."""
        ...

    def nbytes(self, name: str) -> int: ...

    def matrix(self, name: str) -> PackedTensor:
        """A two-dimensional tensor [N, K]. May view the file. ModelLoadError naming the tensor for an unsupported type."""
        ...

    def release(self, name: str) -> None:
        """The tensor has been read, and what was made of it no longer needs the file's memory."""
        ...

    def close(self) -> None: ...


def vector(source: TensorSource, name: str) -> npt.NDArray[np.float32]:
    """A one-dimensional tensor as float32 [N], a copy."""
    return dequantize(source.matrix(name)).reshape(-1)


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """A vector is a matrix of one row here."""
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


class GGUFSource:
    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.where = str(file.path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.file.tensors.items()}

    def nbytes(self, name: str) -> int:
        return self.file.tensors[name].nbytes

    def matrix(self, name: str) -> PackedTensor:
        tensor = self.file.tensors[name]
        raw = tensor.raw()
        try:
            return transcode(raw, tensor.type, _as_matrix(tensor.shape), name=name, type_name=tensor.type_name)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.where}: {error}") from None

    def release(self, name: str) -> None:
        self.file.release(self.file.tensors[name])

    def close(self) -> None:
        self.file.close()


class SafetensorsSource:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        first = checkpoint.files[0].path
        self.where = str(first if len(checkpoint.files) == 1 else first.parent)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.checkpoint.tensors.items()}

    def nbytes(self, name: str) -> int:
        return self.checkpoint.tensors[name].nbytes

    def matrix(self, name: str) -> PackedTensor:
        tensor = self.checkpoint.tensors[name]
        transcoder = _SAFETENSORS_TYPES.get(tensor.dtype)
        if transcoder is None:
            raise ModelLoadError(
                f"{tensor.file.path}: tensor {shown(name)} has the dtype {tensor.dtype}; only F32, F16 and BF16 are supported"
            )
        return transcoder(tensor.raw(), _as_matrix(tensor.shape))

    def release(self, name: str) -> None:
        tensor = self.checkpoint.tensors[name]
        tensor.file.mapped.release(tensor.offset, tensor.nbytes)

    def close(self) -> None:
        self.checkpoint.close()
