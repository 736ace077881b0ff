"""Checked reading of hyperparameters, whichever file they come from: present, of the right type, of a sane size.

The limits are far above any known model and far below what could overflow or exhaust memory by itself.
Not here: which fields a format has (hf_config.py, gguf_config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelLoadError, shown
from octavo.model_config import ModelConfig

MAX_SIZES: Mapping[str, int] = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_layers": 1 << 10,
    "num_heads": 1 << 11,
    "num_kv_heads": 1 << 11,
    "head_dim": 1 << 10,
    "max_position": 1 << 26,
}

_REQUIRED = object()


class Fields:
    """A mapping of settings and where it came from. A value of None counts as absent, as in transformers."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def fail(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {what}")

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.fail(f"{key} is missing")
        return default

    def size(self, key: str, limit: str, default: Any = _REQUIRED) -> int:
        """A positive integer of at most MAX_SIZES[limit]."""
        value = self.get(key, default)
        if type(value) is not int or not 1 <= value <= MAX_SIZES[limit]:
            raise self.fail(f"{key} must be an integer from 1 to {MAX_SIZES[limit]}, got {shown(value)}")
        return value

    def number(self, key: str, low: float, high: float, default: Any = _REQUIRED) -> float:
        """A finite number in [low, high]."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # false for NaN
            raise self.fail(f"{key} must be a number from {low:g} to {high:g}, got {shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, got {shown(value)}")
        return value

    def word(self, key: str, default: Any = _REQUIRED) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.fail(f"{key} must be a string, got {shown(value)}")
        return value


def check_model_config(config: ModelConfig, where: str) -> ModelConfig:
    """The relations between sizes that every attention layer relies on. Returns `config`."""
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(f"{where}: {config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads evenly")
    if config.rope.dim % 2 or not 2 <= config.rope.dim <= config.head_dim:
        raise ModelLoadError(f"{where}: {config.rope.dim} rotated dimensions in heads of {config.head_dim} (must be even and fit)")
    return config
