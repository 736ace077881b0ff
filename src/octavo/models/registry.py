"""From an architecture's name to its class, and from a dictionary of weights to a model that can run.

Stateless. Not here: reading files. Adding a family: one file beside llama.py and one line in the table (docs/add_a_model.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from octavo.errors import ModelLoadError
from octavo.model_config import ModelConfig
from octavo.ops.api import Array, ForwardBatch, Ops
from octavo.weight_spec import WeightSpec

_MODELS = {
    "llama": ("octavo.models.llama", "Llama"),
    "qwen2": ("octavo.models.qwen2", "Qwen2"),
}


class Model(Protocol):
    """What the model runner needs of a model; models/llama.py states the shapes."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None: ...

    def forward(self, batch: ForwardBatch) -> Array: ...

    def logits(self, hidden: Array, num_generated: int) -> Array: ...

    @classmethod
    def weights(cls, c: ModelConfig) -> list[WeightSpec]: ...


def model_class(architecture: str) -> type[Model]:
    """Raises ModelLoadError naming the known architectures."""
    if architecture not in _MODELS:
        raise ModelLoadError(f"architecture {architecture!r} is not supported (supported: {', '.join(sorted(_MODELS))})")
    module, name = _MODELS[architecture]
    found: type[Model] = getattr(importlib.import_module(module), name)
    return found


def build_model(config: ModelConfig, ops: Ops, weights: Mapping[str, Any]) -> Model:
    """The model with every weight of its name map set, exactly once.

    Raises ModelLoadError when `weights` and the name map differ.
    """
    cls = model_class(config.architecture)
    expected = {spec.target for spec in cls.weights(config)}
    if expected != set(weights):
        odd = sorted(expected ^ set(weights))[:5]
        raise ModelLoadError(f"weights do not match the name map of {config.architecture}: {', '.join(odd)}")
    model = cls(config, ops)
    for target, weight in weights.items():
        *path, name = target.split(".")
        owner: Any = model
        for step in path:
            owner = owner[int(step)] if isinstance(owner, list) else getattr(owner, step)
        if getattr(owner, name) is not None:
            raise ModelLoadError(f"weight {target} is set twice")
        setattr(owner, name, weight)
    return model
