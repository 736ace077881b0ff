"""Declarative name maps: where each weight of a model lies in a file, its expected shape, and how it is sharded.

Plain data. A model file declares a table (models/); the loader walks it (loading/weights.py); neither knows the other.
Not here: reading files, packing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a file. Names are stems: ".weight" and ".bias" are appended. "{i}" stands for the layer."""

    hf: str
    gguf: str
    #: Expected rows N (the length, for a vector).
    rows: int
    #: GGUF files of the llama architecture store q and k rows permuted for interleaved rotary pairs; the number of
    #: heads to undo it by, 0 where there is nothing to undo.
    gguf_interleaved_heads: int = 0


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight of the model, set as attribute path `target` ("layers.{i}.attn.qkv_proj")."""

    target: str
    #: linear and embedding go through Ops.pack_linear, vector through Ops.pack_vector.
    kind: Literal["linear", "embedding", "vector"]
    #: Stacked along N in this order.
    parts: tuple[Part, ...]
    #: Expected K; 0 for a vector.
    cols: int = 0
    bias: bool = False
    #: Tensor parallelism: 0 splits N of every part, 1 splits K, None replicates.
    shard_axis: int | None = None
    #: Use the weight of that target when the file holds no tensor of this one (tied embeddings).
    tied_to: str | None = None


def per_layer(table: Iterable[WeightSpec], num_layers: int) -> list[WeightSpec]:
    """The table once for every layer, with "{i}" filled in."""

    def named(spec: WeightSpec, i: int) -> WeightSpec:
        parts = tuple(replace(p, hf=p.hf.format(i=i), gguf=p.gguf.format(i=i)) for p in spec.parts)
        return replace(spec, target=spec.target.format(i=i), parts=parts)

    return [named(spec, i) for i in range(num_layers) for spec in table]
