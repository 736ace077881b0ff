"""`octavo bench make-model`: a model file of a real model's shape with random weights, to measure speed and memory with.

Every quantised block has a scale (and an offset, where its format has one) of its own, so no cache or kernel can profit from
blocks that are alike. Values depend on the seed and the tensor's name alone. Tensors are made and written in pieces, so the
memory taken is small whatever the size of the model. Not here: shapes (model_shapes.py), vocabularies (made_vocabulary.py).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.bench import made_vocabulary
from octavo.bench.made_vocabulary import Vocabulary
from octavo.bench.model_shapes import SHAPES, ModelShape, TensorShape, gguf_hyperparameters, hf_config, tensors
from octavo.errors import ConfigError

ALIGNMENT = 32
#: Values made at a time.
PIECE = 1 << 22
#: (bytes written, bytes in all)
Progress = Callable[[int, int], None]


class Format(NamedTuple):
    """`tensor_type`, `file_type`: GGUF's numbers; a block of 32 values takes `nbytes` bytes. `block`: None for bfloat16."""

    tensor_type: int
    file_type: int
    nbytes: int
    block: np.dtype[Any] | None


FORMATS = {
    "gguf-q4_0": Format(2, 2, 18, np.dtype([("d", "<f2"), ("qs", "V16")])),
    "gguf-q4_1": Format(3, 3, 20, np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "V16")])),
    "gguf-q8_0": Format(8, 7, 34, np.dtype([("d", "<f2"), ("qs", "V32")])),
    "safetensors-bf16": Format(30, 32, 64, None),
}
#: Root mean square of q - 7.5 for q uniform in 0..15, and of q uniform in -127..127.
_RMS4, _RMS8 = math.sqrt(255 / 12), math.sqrt(127 * 128 / 3)


def shape_of(name: str, layers: int | None) -> ModelShape:
    """Raises ConfigError naming the known ones."""
    if name not in SHAPES:
        raise ConfigError(f"there is no shape {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name] if layers is None else replace(SHAPES[name], layers=layers)


def make(
    shape: ModelShape, kind: str, output: Path, *, seed: int = 0, tokenizer: Path | None = None, progress: Progress | None = None
) -> Path:
    """Writes the model and returns its path: a .gguf file, or a folder for safetensors.

    tokenizer: a folder with tokenizer.json; None generates a vocabulary of the right size. Raises ConfigError where the output
    is there already, the disk is too small or the tokenizer does not fit; what was begun is removed then.
    """
    if kind not in FORMATS:
        raise ConfigError(f"there is no format {kind!r}; there are {', '.join(FORMATS)}")
    vocabulary = made_vocabulary.generated(shape) if tokenizer is None else made_vocabulary.from_folder(tokenizer, shape)
    if os.path.lexists(output):
        raise ConfigError(f"{output} is there already: remove it or give another --output")
    size = sum(nbytes(t, kind) for t in tensors(shape)) + (64 << 20)
    folder = output.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder")
    if (free := shutil.disk_usage(folder).free) < size:
        raise ConfigError(f"{output} needs {size >> 20} MiB, and {folder} has {free >> 20} MiB left")
    if kind.startswith("gguf"):
        _write_whole(output, lambda out: _gguf(out, shape, kind, vocabulary, seed, progress))
    else:
        _folder(output, shape, kind, vocabulary, seed, tokenizer, progress)
    return output


def nbytes(tensor: TensorShape, kind: str) -> int:
    """Vectors are float32 in a GGUF file, as every converter writes them."""
    if kind == "safetensors-bf16":
        return tensor.count * 2
    return tensor.count * 4 if len(tensor.shape) == 1 else tensor.count // 32 * FORMATS[kind].nbytes


def _write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """The file under its name when it is whole, and not before."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as out:
            write(out)
        partial.rename(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


# -- values --------------------------------------------------------------------------------------------------------
def pieces(tensor: TensorShape, kind: str, seed: int) -> Iterator[bytes]:
    """The tensor's bytes, in order."""
    rng = np.random.default_rng([seed, zlib.crc32(tensor.gguf.encode())])
    for first in range(0, tensor.count, PIECE):
        count = min(PIECE, tensor.count - first)
        if kind == "safetensors-bf16":
            yield _bf16(rng, tensor, count).tobytes()
        elif len(tensor.shape) == 1:
            yield _vector(rng, tensor, count).tobytes()
        else:
            yield _blocks(rng, tensor.spread, kind, count // 32).tobytes()


def _vector(rng: np.random.Generator, tensor: TensorShape, count: int) -> npt.NDArray[np.float32]:
    values = rng.standard_normal(count, np.float32) * tensor.spread if tensor.spread else rng.uniform(0.5, 1.5, count)
    return np.asarray(values, "<f4")


def _blocks(rng: np.random.Generator, spread: float, kind: str, count: int) -> npt.NDArray[np.void]:
    """`count` blocks; scales of both signs between a half and three halves of what gives the spread."""
    form = FORMATS[kind]
    assert form.block is not None
    out = np.empty(count, form.block)
    quants = np.frombuffer(rng.bytes(count * form.block["qs"].itemsize), np.uint8)
    if kind == "gguf-q8_0":
        quants = np.where(quants == 0x80, 0, quants).astype(np.uint8)  # writers use -127 to 127
    out["qs"] = quants.view(form.block["qs"])
    step = spread / (_RMS8 if kind == "gguf-q8_0" else _RMS4)
    scale = rng.uniform(0.5, 1.5, count) * step
    if kind == "gguf-q4_1":
        out["m"] = -scale * rng.uniform(6.5, 8.5, count)  # around the middle of the sixteen steps
    else:
        scale *= np.where(rng.random(count) < 0.5, -1.0, 1.0)  # or the -8 of Q4_0 would shift every sum one way
    out["d"] = scale
    return out


def _bf16(rng: np.random.Generator, tensor: TensorShape, count: int) -> npt.NDArray[np.uint16]:
    """Random bits, but for the exponent: one of four neighbours, so that making them costs no arithmetic on floats."""
    if len(tensor.shape) == 1:
        return (_vector(rng, tensor, count).view(np.uint32) >> 16).astype("<u2")
    bits = np.frombuffer(rng.bytes(count * 2), "<u2")
    top = 127 + round(math.log2(tensor.spread / 0.88))  # 0.88: the root mean square where the top exponent is 127
    exponent = np.uint16(top) - ((bits >> 7) & np.uint16(3))
    return np.asarray((bits & np.uint16(0x807F)) | (exponent << np.uint16(7)), np.uint16)


# -- files ---------------------------------------------------------------------------------------------------------
def _tensor_data(out: BinaryIO, shape: ModelShape, kind: str, seed: int, alignment: int, progress: Progress | None) -> None:
    total, done = sum(nbytes(t, kind) for t in tensors(shape)), 0
    for tensor in tensors(shape):
        for piece in pieces(tensor, kind, seed):
            out.write(piece)
            done += len(piece)
            if progress is not None:
                progress(done, total)
        out.write(bytes(-nbytes(tensor, kind) % alignment))


def _gguf(out: BinaryIO, shape: ModelShape, kind: str, vocabulary: Vocabulary, seed: int, progress: Progress | None) -> None:
    """GGUF version 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""
    metadata = {
        "general.architecture": shape.architecture,
        "general.name": f"{shape.name} with random weights",
        "general.file_type": FORMATS[kind].file_type,
        "general.quantization_version": 2,
        "general.alignment": ALIGNMENT,
        **gguf_hyperparameters(shape),
        **vocabulary.gguf_metadata(),
    }
    table = tensors(shape)
    head = [b"GGUF", struct.pack("<IQQ", 3, len(table), len(metadata))]
    head += [_string(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for tensor in table:
        dims = tensor.shape[::-1]
        of_type = 0 if len(dims) == 1 else FORMATS[kind].tensor_type
        head.append(_string(tensor.gguf) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, of_type, offset))
        offset += -(-nbytes(tensor, kind) // ALIGNMENT) * ALIGNMENT
    header = b"".join(head)
    out.write(header + bytes(-len(header) % ALIGNMENT))
    _tensor_data(out, shape, kind, seed, ALIGNMENT, progress)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + np.asarray(value, "<i4").tobytes()


def _folder(
    output: Path, shape: ModelShape, kind: str, vocabulary: Vocabulary, seed: int, tokenizer: Path | None, progress: Progress | None
) -> None:
    """A Hugging Face folder: config.json, model.safetensors, and a copy of the tokenizer's files or a generated one."""
    header, offset = {}, 0
    for tensor in tensors(shape):
        size = nbytes(tensor, kind)
        header[tensor.hf] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)

    def write(out: BinaryIO) -> None:
        out.write(struct.pack("<Q", len(raw)) + raw)
        _tensor_data(out, shape, kind, seed, 1, progress)

    output.mkdir()
    try:
        for name, content in ({"config.json": hf_config(shape)} | ({} if tokenizer else made_vocabulary.hf_files(vocabulary))).items():
            (output / name).write_text(json.dumps(content), "utf-8")
        if tokenizer is not None:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                if (tokenizer / name).is_file():
                    shutil.copyfile(tokenizer / name, output / name)
        _write_whole(output / "model.safetensors", write)
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)
        raise
