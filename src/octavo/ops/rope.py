"""Rotary position embedding tables (Su et al. 2021), one for every backend.

Computed in float64 and rounded once to float32: the angle of position 100,000 in float32 is wrong in its third
decimal. Kinds: default; linear interpolation (Chen et al. 2023); llama3 (Llama 3.1's piecewise scaling by wavelength);
yarn (Peng et al. 2023), whose attention factor is folded into cos and sin, as transformers does it.
Pure functions. Not here: the rotation itself (an op), reading the settings (loading/).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelLoadError
from octavo.model_config import RopeConfig

Float64Array = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]

#: Positions whose angles are computed at once: bounds the float64 temporaries of a 128k table.
_CHUNK_POSITIONS = 8192


def rope_cos_sin(rope: RopeConfig, max_position: int) -> tuple[Float32Array, Float32Array]:
    """cos and sin, float32 [max_position, dim / 2] each; column i turns the pair (i, i + dim / 2).

    Raises ModelLoadError for settings no model can have (odd dim, factor 0, unknown kind).
    """
    frequencies = rope_frequencies(rope)
    factor = rope_attention_factor(rope)
    cos = np.empty((max_position, frequencies.size), np.float32)
    sin = np.empty_like(cos)
    for start in range(0, max_position, _CHUNK_POSITIONS):
        positions = np.arange(start, min(start + _CHUNK_POSITIONS, max_position), dtype=np.float64)
        angles = positions[:, None] * frequencies
        cos[start : start + len(positions)] = np.cos(angles) * factor
        sin[start : start + len(positions)] = np.sin(angles) * factor
    return cos, sin


def rope_frequencies(rope: RopeConfig) -> Float64Array:
    """Radians per position of each pair, float64 [dim / 2], scaling applied."""
    _check(rope)
    pairs = np.arange(rope.dim // 2, dtype=np.float64)
    frequencies = rope.theta ** (-2.0 * pairs / rope.dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _yarn(rope, frequencies)
    if rope.freq_factors is not None:  # GGUF stores the llama3 scaling this way: as divisors
        frequencies = frequencies / np.asarray(rope.freq_factors, np.float64)
    return frequencies


def rope_attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 but for yarn (its section 3.4; mscale as in DeepSeek's configs)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return float(rope.attention_factor)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _llama3(rope: RopeConfig, frequencies: Float64Array) -> Float64Array:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended linearly in 1 / wavelength."""
    turns = rope.original_max_position * frequencies / (2.0 * math.pi)  # turns within the original context
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return (1.0 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(rope: RopeConfig, frequencies: Float64Array) -> Float64Array:
    """Pairs that turn more than beta_fast times in the original context are kept, those that turn less than beta_slow
    times are stretched by `factor`, a linear ramp over the pair's index lies between."""

    def pair_of(turns: float) -> float:
        return rope.dim * math.log(rope.original_max_position / (turns * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step
    stretch = np.clip((np.arange(rope.dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return frequencies / rope.factor * stretch + frequencies * (1.0 - stretch)


def _check(rope: RopeConfig) -> None:
    def refuse(reason: str) -> ModelLoadError:
        return ModelLoadError(f"rope settings of the model cannot be used: {reason}")

    if rope.kind not in ("default", "linear", "llama3", "yarn"):
        raise refuse(f"unknown kind {rope.kind!r}")
    if rope.dim < 2 or rope.dim % 2:
        raise refuse(f"rotated dimensions must be even and positive, got {rope.dim}")
    if not (math.isfinite(rope.theta) and rope.theta > 1.0):
        raise refuse(f"theta must be above 1, got {rope.theta}")
    if rope.kind != "default" and not (math.isfinite(rope.factor) and rope.factor > 0.0):
        raise refuse(f"factor must be positive, got {rope.factor}")
    if rope.kind in ("llama3", "yarn") and rope.original_max_position < 1:
        raise refuse(f"{rope.kind} needs original_max_position")
    if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise refuse("high_freq_factor must be above low_freq_factor")
    if rope.kind == "yarn" and not (rope.beta_fast > 0.0 and rope.beta_slow > 0.0):
        raise refuse("beta_fast and beta_slow must be positive")
    if rope.freq_factors is not None:
        if len(rope.freq_factors) != rope.dim // 2:
            raise refuse(f"{len(rope.freq_factors)} frequency factors for {rope.dim // 2} pairs")
        if not all(math.isfinite(value) and value > 0.0 for value in rope.freq_factors):
            raise refuse("frequency factors must be positive")
