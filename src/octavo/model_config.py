"""ModelConfig: the hyperparameters of a model, however they were stored (config.json or GGUF metadata).

Plain data, built and checked by loading/; read by models, worker and the registry of ops.
Not here: tokenizer or generation settings (loading/source.py: ModelFiles), run-time settings (config.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021), half-split pairs (i, i + dim/2).

    `kind`: default; linear (position interpolation); llama3 (frequency-dependent scaling); yarn (Peng et al. 2023).
    An unknown kind is refused at load. `freq_factors`: divisors per pair, from GGUF's rope_freqs.weight.
    """

    theta: float = 10000.0
    #: Rotated dimensions; the head size unless partial.
    dim: int = 64
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    #: Name in models/registry.py: "llama", "qwen2".
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    #: Bias on q, k and v (Qwen2); on every attention and MLP projection (some Llamas).
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    #: Per layer: None sees all, w sees the last w tokens (itself included). Empty: all None.
    sliding_windows: tuple[int | None, ...] = ()
    #: The stored dtype, for `doctor` and KV defaults: "float32", "float16", "bfloat16".
    dtype: str = "float32"

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each KV group: layers with the same one share a group; those that see all come first."""
        windows = set(self.sliding_windows or (None,))
        return tuple(sorted(windows, key=lambda window: window or 0))

    def kv_place(self, layer: int) -> tuple[int, int]:
        """(KV group, number of the layer within it)."""
        windows = self.sliding_windows or (None,) * self.num_layers
        return self.kv_windows.index(windows[layer]), windows[:layer].count(windows[layer])
