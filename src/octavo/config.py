"""EngineConfig: every run-time setting, once. YAML file, environment, CLI flags and Python all read this class.

Plain data, validated on construction. A field is `kv_cache_memory` in Python and YAML, `--kv-cache-memory` as a flag
and `OCTAVO_KV_CACHE_MEMORY` in the environment; the help text of each lives in its metadata.
Not here: hyperparameters of the model (model_config.py), settings of one request (sampling_params.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, get_args

from octavo.errors import ConfigError, shown

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
          "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}  # fmt: skip

#: Counts and sizes beyond these can only be mistakes, and would fail later in an allocation.
_MAX_COUNT = 2**31 - 1
_MAX_BYTES = 2**63 - 1
PolicyName = Literal["fcfs", "priority", "shortest-prefill", "longest-prefix", "fair"]
_OPTIONAL = frozenset({"revision", "num_kv_blocks", "max_model_len", "seed"})
_POSITIVE = (
    "kv_cache_memory", "num_kv_blocks", "block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs",
    "max_prefill_batch_size", "max_decode_batch_size", "max_waiting_requests", "max_waiting_tokens", "max_stalled_steps",
    "promote_after_steps", "event_history",
)  # fmt: skip


def parse_bytes(value: str | int, name: str = "kv_cache_memory") -> int:
    """2147483648 from "2GiB", "2G", "2048MiB" or the number itself. Raises ConfigError naming the setting `name`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", value if isinstance(value, str) else "", re.ASCII)
    if not match or match[2].lower() not in _UNITS:
        raise ConfigError(f"not a memory size for {name}: {shown(value)} (write for example 2GiB or 512MiB)")
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


def _is_integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = _setting("smollm2", "short name, folder, .gguf file or Hugging Face id")
    revision: str | None = _setting(None, "revision of a Hugging Face id")
    backend: Literal["auto", "cpu", "reference", "torch"] = _setting("auto", "who computes; auto: native kernels, else the NumPy reference")
    device: str = _setting("cpu", "torch device; only with --backend torch")
    op_backends: str = _setting("", "override single ops, for example rms_norm=reference,attend=reference")
    threads: int = _setting(0, "threads of the native kernels; 0: what affinity and cgroup allow")
    kv_cache_memory: int | str = _setting("2GiB", "memory of the KV pool")
    kv_dtype: Literal["auto", "f32", "f16", "bf16", "int8"] = _setting(
        "auto", "what the KV pool stores; auto: bf16 on native kernels, f32 on the reference"
    )
    quantize: Literal["none", "int4", "int8"] = _setting(
        "none", "quantise float weights while loading; int4 keeps embedding and output head at int8"
    )
    num_kv_blocks: int | None = _setting(None, "size of the KV pool in blocks, instead of kv_cache_memory")
    block_size: int = _setting(16, "tokens in a KV block")
    max_model_len: int | None = _setting(None, "longest sequence, prompt and answer; default: the model's own")
    max_num_batched_tokens: int = _setting(512, "tokens computed in one step")
    max_num_seqs: int = _setting(64, "sequences running at once")
    max_prefill_batch_size: int = _setting(16, "requests given more than one token in a step")
    max_decode_batch_size: int = _setting(64, "requests given one token in a step")
    max_waiting_requests: int = _setting(10_000, "requests queued before new ones are refused")
    max_waiting_tokens: int = _setting(8_000_000, "prompt tokens of queued requests, all together, before new ones are refused")
    policy: PolicyName = _setting("priority", "who is admitted first; priority: by their priority field, equal ones by arrival")
    promote_after_steps: int = _setting(
        1000, "steps a waiting request may be overtaken by later ones (priority, shortest-prefill, longest-prefix)"
    )
    max_stalled_steps: int = _setting(8, "most steps in a row a running stream or the first waiting prompt gets nothing")
    enable_prefix_caching: bool = _setting(True, "share KV blocks of equal prefixes")
    replay: bool = _setting(True, "replay the recorded native calls of a step in one call; off: call each from Python, with the same bits")
    reuse_generated: bool = _setting(False, "let prompts share KV blocks computed as an answer; such hits may change low bits")
    seed: int | None = _setting(None, "base seed of requests that bring none")
    event_history: int = _setting(4096, "steps whose events are kept in memory")

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_cache_memory", parse_bytes(self.kv_cache_memory))
        for name in _POSITIVE:
            value, most = getattr(self, name), _MAX_BYTES if name == "kv_cache_memory" else _MAX_COUNT
            if not _is_integer(value, 1, most) and not (value is None and name in _OPTIONAL):
                raise ConfigError(f"{name} must be a positive integer (at most {most}), got {shown(value)}")
        if not _is_integer(self.threads, 0, _MAX_COUNT):
            raise ConfigError(f"threads must be 0 or a positive integer, got {shown(self.threads)}")
        if self.seed is not None and not _is_integer(self.seed, -(2**63), 2**64 - 1):
            raise ConfigError(f"seed must be an integer in [-2**63, 2**64), got {shown(self.seed)}")
        for name, words in (
            ("backend", ("auto", "cpu", "reference", "torch")),
            ("kv_dtype", ("auto", "f32", "f16", "bf16", "int8")),
            ("policy", get_args(PolicyName)),
            ("quantize", ("none", "int4", "int8")),
        ):
            if getattr(self, name) not in words:
                raise ConfigError(f"{name} must be {', '.join(words[:-1])} or {words[-1]}, got {shown(getattr(self, name))}")
        for name in ("model", "device", "op_backends", "revision"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name in _OPTIONAL):
                raise ConfigError(f"{name} must be text, got {shown(value)}")
        for name in ("enable_prefix_caching", "replay", "reuse_generated"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {shown(getattr(self, name))}")
