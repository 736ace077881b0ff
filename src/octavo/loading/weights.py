"""Fills a model's weights from its files by walking the declarative table of weight_spec.py.

Every weight of the table is filled exactly once and every tensor of the file is used, or loading fails with names.
Owner of the open files while it runs. Not here: the tables (models/), block formats (quantization/), layouts (ops/).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelLoadError, shown
from octavo.loading.gguf import GGUFFile
from octavo.loading.gguf_config import ROPE_FREQS
from octavo.loading.model_files import ModelFiles
from octavo.loading.safetensors import Checkpoint
from octavo.loading.tensor_source import GGUFSource, SafetensorsSource, TensorSource, vector
from octavo.ops.api import Ops, PackedTensor
from octavo.quantization import groups
from octavo.quantization.packed import permute_rows
from octavo.weight_spec import Part, WeightSpec

#: Buffers that old checkpoints store although they follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"
#: Matrices that int4 keeps at eight bits: one row of them is a whole token, and errors there cost most.
_EIGHT_BITS = frozenset({"embed.weight", "lm_head.weight"})

_log = logging.getLogger("octavo")


def load_weights(
    files: ModelFiles,
    specs: Sequence[WeightSpec],
    ops: Ops,
    progress: Callable[[int, int], None] | None = None,
    *,
    quantize: str = "none",
    threads: int = 1,
) -> dict[str, Any]:
    """Target -> weight as `ops` packs it; a tied target shares the object of the one it is tied to.

    `progress` gets (bytes done, bytes in all) after each weight. quantize: "none", "int4" or "int8" of float matrices
    (quantization/groups.py), by so many `threads`; what is quantised already stays. Raises ModelLoadError naming tensors.
    """
    loader = _Loader(_open(files), gguf=files.kind == "gguf", quantize=quantize, threads=threads)
    try:
        plain, tied = loader.plan(specs)
        weights: dict[str, Any] = {}
        total = sum(loader.source.nbytes(name) for name in loader.used)
        done = 0
        for spec in plain:
            weights[spec.target] = loader.load(spec, ops)
            for name in loader.names(spec):
                loader.source.release(name)
                done += loader.source.nbytes(name)
            if progress is not None:
                progress(done, total)
    finally:
        loader.source.close()
    loader.log_quantized()
    for spec in tied:
        if spec.tied_to not in weights:
            raise ModelLoadError(f"{spec.target} is tied to {spec.tied_to}, which is no weight of the model")
        weights[spec.target] = weights[spec.tied_to]
    return weights


def _open(files: ModelFiles) -> TensorSource:
    if files.kind == "safetensors":
        return SafetensorsSource(Checkpoint(files.paths))
    file = files.gguf_file
    return GGUFSource(GGUFFile(files.paths[0]) if file is None or file.closed else file)


class _Loader:
    """One load: the open source, which name column of the table it uses, and the tensors spoken for."""

    def __init__(self, source: TensorSource, gguf: bool, quantize: str = "none", threads: int = 1) -> None:
        self.source = source
        self.gguf = gguf
        self.quantize = quantize
        self.threads = threads
        #: Matrices by the layout `quantize` gave them, or by "kept ..." and why.
        self.quantized: Counter[str] = Counter()
        self.shapes = source.shapes()
        self.used: set[str] = set()

    def stem(self, part: Part) -> str:
        return part.gguf if self.gguf else part.hf

    def names(self, spec: WeightSpec) -> list[str]:
        """The tensors of a spec: one weight a part, then one bias a part."""
        stems = [self.stem(part) for part in spec.parts]
        return [f"{stem}.weight" for stem in stems] + ([f"{stem}.bias" for stem in stems] if spec.bias else [])

    # -- headers only ----------------------------------------------------------------------------------------------
    def plan(self, specs: Sequence[WeightSpec]) -> tuple[list[WeightSpec], list[WeightSpec]]:
        """Checks the whole table against the whole file before anything is packed; (specs to load, tied ones).

        A Hugging Face file may hold the head that its configuration ties to the embedding: it is ignored, as
        transformers does. In a GGUF file a head of its own means that it is not tied, so it is used.
        """
        tied = [s for s in specs if s.tied_to and not (self.gguf and set(self.names(s)) <= set(self.shapes))]
        plain = [s for s in specs if s not in tied]
        targets = [s.target for s in specs]
        if len(set(targets)) != len(targets):
            raise ModelLoadError(f"the name map sets a weight twice: {_some(t for t in set(targets) if targets.count(t) > 1)}")
        missing: list[str] = []
        for spec in plain:
            for name in self.names(spec):
                if name in self.used:
                    raise ModelLoadError(f"the name map uses tensor {shown(name)} twice")
                self.used.add(name)
                if name not in self.shapes:
                    missing.append(name)
        if missing:
            raise ModelLoadError(f"{self.source.where}: {len(missing)} tensors are missing: {_some(missing)}")
        ignored = {name for spec in tied for name in self.names(spec)} if not self.gguf else {ROPE_FREQS}
        unused = [n for n in self.shapes if n not in self.used and n not in ignored and (self.gguf or not n.endswith(_DERIVED))]
        if unused:
            kind = "biases" if all(name.endswith(".bias") for name in unused) else "tensors"
            raise ModelLoadError(f"{self.source.where}: {len(unused)} {kind} are not part of the model: {_some(unused)}")
        for spec in plain:
            self._check_shapes(spec)
        return plain, tied

    def _check_shapes(self, spec: WeightSpec) -> None:
        for part in spec.parts:
            self._check_shape(f"{self.stem(part)}.weight", (part.rows,) if spec.kind == "vector" else (part.rows, spec.cols))
            if spec.bias:
                self._check_shape(f"{self.stem(part)}.bias", (part.rows,))

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        if self.shapes[name] != expected:
            raise ModelLoadError(
                f"{self.source.where}: tensor {shown(name)} has the shape {list(self.shapes[name])}, the model needs {list(expected)}"
            )

    # -- data ------------------------------------------------------------------------------------------------------
    def load(self, spec: WeightSpec, ops: Ops) -> Any:
        if spec.kind == "vector":
            return ops.pack_vector(np.concatenate([vector(self.source, name) for name in self.names(spec)]))
        bias = np.concatenate([self._bias(part) for part in spec.parts]) if spec.bias else None
        return ops.pack_linear([self._matrix(part, spec) for part in spec.parts], bias)

    def _matrix(self, part: Part, spec: WeightSpec) -> PackedTensor:
        packed = self.source.matrix(f"{self.stem(part)}.weight")
        if self.quantize != "none":
            packed = self._quantize(packed, 8 if spec.target in _EIGHT_BITS or self.quantize == "int8" else 4)
        return packed if (order := self._row_order(part)) is None else permute_rows(packed, order)

    def _quantize(self, packed: PackedTensor, bits: int) -> PackedTensor:
        if packed.layout not in groups.FLOATS:
            self.quantized[f"kept as they are in the file ({packed.layout})"] += 1
            return packed
        if not groups.group_size(packed.shape[1]):
            self.quantized["kept as floats (K is no multiple of 32)"] += 1
            return packed
        made = groups.quantize(packed, bits, self.threads)
        self.quantized[made.layout] += 1
        return made

    def log_quantized(self) -> None:
        if self.quantize == "none":
            return
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.quantized.items()))
        changed = any(not what.startswith("kept") for what in self.quantized)
        _log.log(logging.INFO if changed else logging.WARNING, "quantize %s: matrices: %s", self.quantize, counts)

    def _bias(self, part: Part) -> npt.NDArray[np.float32]:
        values = vector(self.source, f"{self.stem(part)}.bias")
        return values if (order := self._row_order(part)) is None else values[order]

    def _row_order(self, part: Part) -> npt.NDArray[np.int64] | None:
        """Where each row lies in the file. The GGUF writer moves row (half, i) of a head to row (i, half), biases too."""
        if not self.gguf or part.gguf_interleaved_heads == 0:
            return None
        return np.arange(part.rows).reshape(part.gguf_interleaved_heads, -1, 2).swapaxes(1, 2).ravel()


def _some(names: Iterable[str], most: int = 8) -> str:
    """A sorted, readable part of a list that may be very long."""
    found = sorted(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
