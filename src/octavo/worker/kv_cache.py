"""How large the KV pool is: from the memory a user gives to blocks, checked before anything is allocated.

Pure functions. Not here: which request holds which block (engine/), how a block is laid out (ops/).
"""

from __future__ import annotations

import os
from dataclasses import replace

from octavo.config import EngineConfig
from octavo.engine.scheduler_output import KVGroup
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


#: Memory is divided between groups as sequences of so many windows need it: longer ones leave some of the window's pool unused,
#: shorter ones some of the others.
WINDOWS_PER_SEQUENCE = 4


def served_windows(model: ModelConfig, model_len: int) -> tuple[int | None, ...]:
    """`sliding_windows`, without those that no sequence of `model_len` tokens reaches the end of."""
    windows = tuple(window if window is not None and window < model_len else None for window in model.sliding_windows)
    return windows if any(windows) else ()


def kv_specs(model: ModelConfig, config: EngineConfig, ops: Ops) -> tuple[KVSpec, ...]:
    """The pool of each KV group: together as many blocks as fit `kv_cache_memory`, of none more than could ever be used.

    `model.sliding_windows` are those served. Raises ConfigError when not one block fits, or the pools are larger than the
    machine's memory.
    """
    dtype, size, length = kv_dtype(config, ops.name), config.block_size, max_model_len(model, config)
    windows = model.kv_windows
    layers = [(model.sliding_windows or (None,) * model.num_layers).count(window) for window in windows]
    ones = [KVSpec(count, 1, size, model.num_kv_heads, model.head_dim, dtype) for count in layers]
    block_bytes = [ops.kv_block_bytes(one) for one in ones]
    useful = [config.max_num_seqs * _blocks(window, length, config) for window in windows]
    if config.num_kv_blocks is not None:
        wanted = config.num_kv_blocks
        counts = [wanted if window is None else min(wanted, most) for window, most in zip(windows, useful, strict=True)]
    else:
        memory, limit = int(config.kv_cache_memory), length
        if any(windows):
            limit = min(length, WINDOWS_PER_SEQUENCE * max(window or 0 for window in windows))
        shares = [_blocks(window, limit, config) for window in windows]
        of_a_sequence = sum(share * each for share, each in zip(shares, block_bytes, strict=True))
        counts = [min(memory * share // of_a_sequence, most) for share, most in zip(shares, useful, strict=True)]
        if min(counts) < 1:
            raise ConfigError(f"kv_cache_memory is {memory} bytes, but one block of {size} tokens takes {sum(block_bytes)}")
    total = sum(count * each for count, each in zip(counts, block_bytes, strict=True))
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total > physical:
        raise ConfigError(f"the KV pool would take {total} bytes, but the machine has {physical}: lower kv_cache_memory")
    return tuple(replace(one, num_blocks=count) for one, count in zip(ones, counts, strict=True))


def _blocks(window: int | None, length: int, config: EngineConfig) -> int:
    """Most blocks that a sequence of `length` tokens holds at a time."""
    whole = -(-length // config.block_size)
    return whole if window is None else min(whole, KVGroup(1, config.block_size, window).blocks_in_window(config.max_num_batched_tokens))
