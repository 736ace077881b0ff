"""The shapes a model's ops work on, and random weights and batches of them: what kernels.py measures with.

Shapes come from the model's own files, walked as at load, with nothing packed; or from the command line.
Stateless. Not here: timing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.model_config import ModelConfig
from octavo.ops.api import ForwardBatch, Layout, PackedTensor
from octavo.ops.layout import BLOCK, NIBBLES

BLOCK_SIZE = 16
_MAX_SIDE = 1 << 20


class Part(NamedTuple):
    """A PackedTensor without its values."""

    layout: Layout
    shape: tuple[int, int]
    scale_dtype: Any = np.float16
    offset: bool = False
    zero: int = 0


@dataclass(frozen=True, slots=True)
class Matrix:
    name: str
    parts: tuple[Part, ...]
    #: The matrix of the output: rows that draw a token, never whole prompts.
    is_head: bool = False

    @property
    def columns(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def inputs(self) -> int:
        return self.parts[0].shape[1]

    @property
    def layouts(self) -> str:
        return "+".join(dict.fromkeys(part.layout for part in self.parts))


@dataclass(frozen=True, slots=True)
class ModelShapes:
    name: str
    matrices: tuple[Matrix, ...]
    #: None: matrices alone.
    config: ModelConfig | None = None


class _Shapes:
    """Stands in for an Ops while weights are walked: remembers what they are instead of packing them."""

    def pack_linear(self, parts: Sequence[PackedTensor], bias: object = None) -> tuple[Part, ...]:
        return tuple(
            Part(p.layout, p.shape, np.float16 if p.scale is None else p.scale.dtype.type, p.offset is not None, p.zero) for p in parts
        )

    def pack_vector(self, values: object) -> None:
        return None


def of_model(config: EngineConfig) -> ModelShapes:
    """Each distinct matrix of a model once, under the name of the first layer that has it. Raises ModelLoadError or ConfigError."""
    from octavo.loading.weights import load_weights
    from octavo.models.registry import model_class
    from octavo.wiring import find_model

    files = find_model(config)
    specs = model_class(files.config.architecture).weights(files.config)
    weights: dict[str, Any] = load_weights(files, specs, _Shapes(), quantize=config.quantize)  # type: ignore[arg-type]
    found: dict[tuple[str, tuple[Part, ...]], Matrix] = {}
    for target, parts in weights.items():
        name = target.removesuffix(".weight").rpartition(".")[2]
        if parts is None or name == "embed":
            continue
        found.setdefault((name, parts), Matrix(name, parts, is_head=parts[0].shape[0] == files.config.vocab_size))
    return ModelShapes(config.model, tuple(found.values()), files.config)


def of_text(shapes: str, layouts: Sequence[str]) -> ModelShapes:
    """Matrices "COLUMNSxINPUTS,..." in every one of the layouts. Raises ConfigError."""
    matrices = []
    for text in shapes.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})x(\d{1,7})\s*", text, re.ASCII)
        columns, inputs = (int(match[1]), int(match[2])) if match else (0, 0)
        if not (1 <= columns <= _MAX_SIDE and 1 <= inputs <= _MAX_SIDE and columns * inputs <= 1 << 31):
            raise ConfigError(f"--shape takes COLUMNSxINPUTS,... of at most 2^31 numbers, for example 4096x4096, got {text!r}")
        matrices += [Matrix("", (part(name, columns, inputs),)) for name in layouts]
    return ModelShapes(shapes, tuple(matrices))


def part(layout: str, columns: int, inputs: int) -> Part:
    """Raises ConfigError for an unknown layout, or one whose blocks do not fit."""
    known = next((name for name in BLOCK if name == layout), None)
    if known is None:
        raise ConfigError(f"--layout: there is no layout {layout!r} (layouts: {', '.join(BLOCK)})")
    if BLOCK[known] and inputs % BLOCK[known]:
        raise ConfigError(f"layout {layout} has blocks of {BLOCK[known]}, {inputs} inputs are not a multiple")
    return Part(known, (columns, inputs), offset=known in NIBBLES)


def random_packed(rng: np.random.Generator, what: Part) -> PackedTensor:
    """Random values of about the size that weights have."""
    rows, cols = what.shape
    if what.layout == "f32":
        return PackedTensor("f32", what.shape, 0.02 * rng.standard_normal(what.shape, dtype=np.float32))
    if what.layout in ("f16", "bf16"):
        values = 0.02 * rng.standard_normal(what.shape, dtype=np.float32)
        bits = values.astype(np.float16).view(np.uint16) if what.layout == "f16" else (values.view(np.uint32) >> 16).astype(np.uint16)
        return PackedTensor(what.layout, what.shape, bits)

    def scales() -> npt.NDArray[Any]:
        return (rng.random((rows, cols // BLOCK[what.layout]), np.float32) * 0.01).astype(what.scale_dtype)

    if what.layout in NIBBLES:
        data: npt.NDArray[Any] = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    else:
        data = rng.integers(-128, 128, (rows, cols), dtype=np.int8)
    return PackedTensor(what.layout, what.shape, data, scales(), scales() if what.offset else None, what.zero)


def one_sequence_each(sequences: Sequence[int], length: int, rows: int, kv: Any) -> ForwardBatch:
    """The last `rows` tokens of each of some sequences of `length`; sequence s has the blocks from s * ceil(length / 16) on."""
    per_sequence = -(-length // BLOCK_SIZE)
    tables = np.array([np.arange(per_sequence) + per_sequence * s for s in sequences], np.int32)
    positions = np.tile(np.arange(length - rows, length, dtype=np.int32), len(sequences))
    segment = np.repeat(np.arange(len(sequences)), rows)
    total = len(positions)
    return ForwardBatch(
        token_ids=np.zeros(total, np.int32),
        positions=positions,
        query_start_loc=np.arange(0, total + 1, rows, dtype=np.int32),
        seq_lens=np.full(len(sequences), length, np.int32),
        block_tables=(tables,),
        slot_mapping=(tables[segment, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,),
        num_generated=total if rows == 1 else 0,
        logits_rows=np.arange(total, dtype=np.int32),
        num_generated_logits=total if rows == 1 else 0,
        kv=(kv,),
    )
