"""How large the KV pool is: from the memory a user gives to blocks, checked before anything is allocated.

Pure functions. Not here: which request holds which block (engine/), how a block is laid out (ops/).
"""

from __future__ import annotations

import os

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.model_config import ModelConfig
from octavo.ops.api import KVSpec, Ops
from octavo.ops.needs import kv_dtype


def max_model_len(model: ModelConfig, config: EngineConfig) -> int:
    """The longest sequence served. Raises ConfigError when more is asked than the model was made for."""
    if config.max_model_len is None:
        return model.max_position
    if config.max_model_len > model.max_position:
        raise ConfigError(f"max_model_len {config.max_model_len} is more than the model's {model.max_position} positions")
    return config.max_model_len


def kv_spec(model: ModelConfig, config: EngineConfig, ops: Ops) -> KVSpec:
    """The pool of the one group there is: as many blocks as fit `kv_cache_memory`, no more than could ever be used.

    Raises ConfigError when not one block fits, or the pool is larger than the machine's memory.
    """
    one = KVSpec(model.num_layers, 1, config.block_size, model.num_kv_heads, model.head_dim, kv_dtype(config, ops.name))
    block_bytes = ops.kv_block_bytes(one)
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    else:
        memory = int(config.kv_cache_memory)
        useful = config.max_num_seqs * -(-max_model_len(model, config) // config.block_size)
        num_blocks = min(memory // block_bytes, useful)
        if num_blocks < 1:
            raise ConfigError(f"kv_cache_memory is {memory} bytes, but one block of {config.block_size} tokens takes {block_bytes}")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_blocks * block_bytes > physical:
        raise ConfigError(f"the KV pool would take {num_blocks * block_bytes} bytes, but the machine has {physical}: lower kv_cache_memory")
    return KVSpec(one.num_layers, num_blocks, one.block_size, one.num_kv_heads, one.head_dim, one.dtype)
