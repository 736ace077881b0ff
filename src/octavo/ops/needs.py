"""Which ops there are, which belong together, what a model needs of them, and the reasons every backend shares for declining.

Stateless tables. A backend's `supports` starts from `common_reasons` and adds its own limits.
Not here: the choice (registry.py), what an op means (api.py).
"""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.model_config import ModelConfig
from octavo.ops.api import KVDtype, OpNeeds
from octavo.ops.layout import BLOCK

#: Ops that hand private objects to one another (packed weights, rotary tables, KV pools) must come from one backend.
OP_GROUPS: tuple[tuple[str, ...], ...] = (
    ("pack_linear", "linear", "embedding"),
    ("pack_vector", "rms_norm", "add_rms_norm"),
    ("rope_table", "rope_kv_write", "attend", "kv_block_bytes", "alloc_kv", "copy_blocks", "export_block", "import_block"),
    ("add_",),
    ("silu_mul",),
    ("take_rows",),
)
OP_NAMES: tuple[str, ...] = tuple(op for group in OP_GROUPS for op in group)


def kv_dtype(config: EngineConfig, backend: str) -> KVDtype:
    """What `auto` means: bfloat16 on the native kernels, float32 on the reference and torch."""
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return "bf16" if backend in ("auto", "cpu") else "f32"


def op_needs(model: ModelConfig, config: EngineConfig) -> OpNeeds:
    """What a model will ask of the configured backend."""
    return OpNeeds(
        head_dim=model.head_dim,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        rope_dim=model.rope.dim,
        kv_dtype=kv_dtype(config, config.backend),
        block_size=config.block_size,
        sliding_window=any(window is not None for window in model.sliding_windows),
    )


def common_reasons(op: str, needs: OpNeeds) -> list[str]:
    """Reasons no backend could run `op` for these needs: the needs themselves make no sense, or the op is unknown."""
    reasons: list[str] = []
    if op not in OP_NAMES:
        return [f"there is no op {op!r}"]
    if op in ("pack_linear", "linear", "embedding"):
        reasons += [f"unknown weight layout {name!r}" for name in sorted(needs.layouts) if name not in BLOCK]
    if op in OP_GROUPS[2]:
        if needs.num_kv_heads < 1 or needs.num_heads % needs.num_kv_heads:
            reasons.append(f"{needs.num_heads} query heads cannot share {needs.num_kv_heads} KV heads evenly")
        if needs.rope_dim % 2 or not 0 < needs.rope_dim <= needs.head_dim:
            reasons.append(f"rotary dimension {needs.rope_dim} must be even and at most the head size {needs.head_dim}")
        if needs.kv_dtype not in ("f32", "f16", "bf16", "int8"):
            reasons.append(f"unknown KV dtype {needs.kv_dtype!r}")
        if needs.block_size < 1:
            reasons.append(f"block size must be positive, got {needs.block_size}")
    return reasons
